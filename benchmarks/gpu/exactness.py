"""Check that runs on a GPU agree with runs on a CPU, of the other framework, and with repetitions of themselves.

No time is measured, so all these runs may be executed concurrently.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.figures import largest_relative_difference
from allstep.benchmarks.gpu import synchronisation
from allstep.benchmarks.gpu.effort import Effort
from allstep.commands.parity import command as parity
from allstep.commands.shared.jobs import train_command
from allstep.commands.shared.measure import job
from allstep.commands.shared.records.measured import Figure
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.catalog.strategies import FRAMEWORKS

SAME_CURVE = "<= 1e-5"


@dataclass(frozen=True)
class Trial:
    """Commands of runs, and the figures of their results."""

    commands: Sequence[Sequence[str]]
    figures: Callable[[], list[Figure]]
    """Function that returns the figures, to be called when all runs have succeeded."""


def curves(effort: Effort, folder: Path) -> Trial:
    """Compare the losses of every step of the CNN on digits in float32, trained as by `allstep parity`."""
    devices = {"cpu": "cpu", "gpu": effort.device}
    outputs = _outputs(folder, devices)

    def figures() -> list[Figure]:
        on_gpu = (outputs[framework, "gpu"] for framework in ("tensorflow", "pytorch"))
        frameworks = _apart("losses in float32 on the GPU, tensorflow from pytorch", *on_gpu)
        return [*_each_apart("GPU from CPU", outputs, "gpu", "cpu"), frameworks]

    return Trial([_curve(name, devices[at], output, effort) for (name, at), output in outputs.items()], figures)


def compiled_curves(effort: Effort, folder: Path) -> Trial:
    """Compare the same losses on the GPU with and without --compile."""
    flags = {"plain": (), "compiled": ("--compile",)}
    outputs = _outputs(folder, flags)
    commands = [_curve(name, effort.device, output, effort, *flags[how]) for (name, how), output in outputs.items()]
    return Trial(commands, lambda: _each_apart("--compile from without", outputs, "compiled", "plain"))


def equal_bits(effort: Effort, folder: Path) -> Trial:
    """Compare the checksums of the weights of two equal runs of ResNet-18 in bf16 with --deterministic."""
    batch = effort.small_batch["resnet18"]
    outputs = _outputs(folder, ("1", "2"))

    def figures() -> list[Figure]:
        sums = {key: read_events(output / FILE).ends[0].weights_checksum for key, output in outputs.items()}
        differ = {framework: float(sums[framework, "1"] != sums[framework, "2"]) for framework in FRAMEWORKS}
        return [
            Figure(f"{framework}: equal runs, --deterministic, that end in other bits", value, 0, value, "<= 0")
            for framework, value in differ.items()
        ]

    flags = (
        *("--dataset", "synthetic", "--synthetic-shape", 32, 32, 3),
        *("--synthetic-samples", batch * effort.deterministic_steps, "--batch-size", batch, "--epochs", 1),
        *("--model", "resnet18", "--precision", "bf16", "--deterministic"),
    )
    commands = [_single(framework, effort.device, output, *flags) for (framework, _), output in outputs.items()]
    return Trial(commands, figures)


def half_precision(effort: Effort, folder: Path) -> Trial:
    """Compare the validation accuracy of the CNN on digits in fp16, with loss scaling, and in float32."""
    precisions = ("fp16", "float32")
    outputs = _outputs(folder, precisions)

    def figures() -> list[Figure]:
        found = []
        for framework in FRAMEWORKS:
            epochs = [read_events(outputs[framework, precision] / FILE).epochs[-1] for precision in precisions]
            ours, reference = (epoch.validation_accuracy or 0.0 for epoch in epochs)
            what = f"{framework}: validation accuracy, fp16 / float32"
            found.append(Figure(what, ours, reference, ours / reference, ">= 0.98"))
        return found

    flags = ("--dataset", "digits", "--model", "cnn", "--epochs", 3, "--precision")
    commands = [
        _single(framework, effort.device, output, *flags, precision)
        for (framework, precision), output in outputs.items()
    ]
    return Trial(commands, figures)


def first_run(effort: Effort, folder: Path) -> Trial:
    """Run README's first command, two ranks on any number of GPUs, without flags and thus regardless of `effort`."""
    commands = [job(f"allstep.{framework}.train", "--epochs", 1) for framework in FRAMEWORKS]
    return Trial(commands, lambda: [Figure("make train's runs that fail", 0, 0, 0, "<= 0")])


def synchronisations(effort: Effort, folder: Path) -> Trial:
    """Count the synchronisations that torch's debug mode reports in steps of ResNet-18 in bf16."""
    output = folder / "waits"
    flags = ("--dataset", "synthetic", "--synthetic-shape", 32, 32, 3, "--model", "resnet18", "--precision", "bf16")

    def figures() -> list[Figure]:
        waits = int(output.read_text()) / synchronisation.NUM_STEPS
        return [Figure("pytorch: waits of the host for the GPU in a step", waits, 0, waits, "<= 0")]

    return Trial([job(synchronisation.__name__, output, *flags, "--device", effort.device, num_ranks=None)], figures)


def _outputs(folder: Path, ways: Iterable[str]) -> dict[tuple[str, str], Path]:
    """Return an output directory for each framework and way to train."""
    return {(framework, way): folder / f"{framework}-{way}" for framework in FRAMEWORKS for way in ways}


def _curve(framework: str, device: str, output: Path, effort: Effort, *flags: str) -> list[str]:
    recipe = (*parity.DATA_FLAGS, *parity.SGD, "--momentum", 0.9, "--seed", parity.SEED)
    epochs = ("--epochs", effort.exact_epochs, "--log-every", 1, "--precision", "float32")
    return _single(framework, device, output, *recipe, *epochs, *flags)


def _single(framework: str, device: str, output: Path, *flags: object) -> list[str]:
    given = ("--device", device, "--output-dir", output, *flags)
    return train_command(framework, "single", 1, given)


def _each_apart(what: str, outputs: Mapping[tuple[str, str], Path], ours: str, reference: str) -> list[Figure]:
    """Return how far the losses of two ways to train are apart, in each framework."""
    return [
        _apart(f"{framework}: losses in float32, {what}", outputs[framework, ours], outputs[framework, reference])
        for framework in FRAMEWORKS
    ]


def _apart(what: str, ours: Path, reference: Path) -> Figure:
    """Return the largest relative difference of the losses of two runs."""
    one, other = ([step.loss for step in read_events(output / FILE).steps] for output in (ours, reference))
    return Figure(what, one[-1], other[-1], largest_relative_difference(one, other), SAME_CURVE)
