"""Whether runs on a GPU end where they must: as on a CPU, as the other framework, and as the same run before."""

from __future__ import annotations

from pathlib import Path

from allstep.benchmarks.harness.measure import job, largest_relative_difference, run
from allstep.benchmarks.proofs import parity
from allstep.benchmarks.proofs.gpu.effort import Effort
from allstep.benchmarks.records.figures import Figure
from allstep.benchmarks.records.runs import Events, read_events
from allstep.common.registry import FRAMEWORKS

SAME_CURVE = "<= 1e-5"


def run_events(output_dir: Path) -> Events:
    """What a run has reported."""
    return read_events(output_dir / "metrics.jsonl")


def curves(effort: Effort, folder: Path) -> list[Figure]:
    """The CNN on digits in float32, as `allstep parity` trains it: losses of every step."""
    places = {
        (framework, device): folder / f"{framework}-{device}" for framework in FRAMEWORKS for device in ("cpu", "gpu")
    }
    devices = {"cpu": "cpu", "gpu": effort.device}
    run(
        *(
            job(
                f"allstep.{framework}.train",
                *(*parity.DATA_FLAGS, *parity.SGD, "--momentum", 0.9, "--seed", parity.SEED),
                *("--epochs", effort.exact_epochs, "--log-every", 1, "--precision", "float32"),
                *("--strategy", "single", "--device", devices[device], "--output-dir", output),
                num_ranks=None,
            )
            for (framework, device), output in places.items()
        )
    )
    losses = {place: [step.loss for step in run_events(output).steps] for place, output in places.items()}

    def compared(what: str, ours: tuple[str, str], reference: tuple[str, str]) -> Figure:
        difference = largest_relative_difference(losses[ours], losses[reference])
        return Figure(what, losses[ours][-1], losses[reference][-1], difference, SAME_CURVE)

    return [
        *(
            compared(f"{framework}: losses in float32, GPU from CPU", (framework, "gpu"), (framework, "cpu"))
            for framework in FRAMEWORKS
        ),
        compared("losses in float32 on the GPU, tensorflow from pytorch", ("tensorflow", "gpu"), ("pytorch", "gpu")),
    ]


def equal_bits(effort: Effort, folder: Path) -> list[Figure]:
    """ResNet-18 in bf16 with --deterministic, twice: the checksum of the weights."""
    batch = effort.small_batch["resnet18"]
    outputs = {(framework, turn): folder / f"{framework}-{turn}" for framework in FRAMEWORKS for turn in (1, 2)}
    run(
        *(
            job(
                f"allstep.{framework}.train",
                *("--dataset", "synthetic", "--synthetic-shape", 32, 32, 3),
                *("--synthetic-samples", batch * effort.deterministic_steps, "--batch-size", batch, "--epochs", 1),
                *("--model", "resnet18", "--precision", "bf16", "--deterministic"),
                *("--strategy", "single", "--device", effort.device, "--output-dir", output),
                num_ranks=None,
            )
            for (framework, _), output in outputs.items()
        )
    )
    sums = {place: run_events(output).ends[0].weights_checksum for place, output in outputs.items()}
    differ = {framework: float(sums[framework, 1] != sums[framework, 2]) for framework in FRAMEWORKS}
    return [
        Figure(f"{framework}: equal runs, --deterministic, that end in other bits", value, 0, value, "<= 0")
        for framework, value in differ.items()
    ]


def half_precision(effort: Effort, folder: Path) -> list[Figure]:
    """The CNN on digits in fp16, with its loss scaled, beside float32: what it has learned."""
    outputs = {
        (framework, precision): folder / f"{framework}-{precision}"
        for framework in FRAMEWORKS
        for precision in ("fp16", "float32")
    }
    run(
        *(
            job(
                f"allstep.{framework}.train",
                *("--dataset", "digits", "--model", "cnn", "--epochs", 3, "--precision", precision),
                *("--strategy", "single", "--device", effort.device, "--output-dir", output),
                num_ranks=None,
            )
            for (framework, precision), output in outputs.items()
        )
    )
    scores = {place: run_events(output).epochs[-1].validation_accuracy or 0.0 for place, output in outputs.items()}
    return [
        Figure(
            f"{framework}: validation accuracy, fp16 / float32",
            scores[framework, "fp16"],
            scores[framework, "float32"],
            scores[framework, "fp16"] / scores[framework, "float32"],
            ">= 0.98",
        )
        for framework in FRAMEWORKS
    ]


def first_run(effort: Effort, folder: Path) -> list[Figure]:
    """README's first command, two ranks on however many GPUs there are, without a flag: whatever `effort` says."""
    run(*(job(f"allstep.{framework}.train", "--epochs", 1) for framework in FRAMEWORKS))
    return [Figure("make train's runs that fail", 0, 0, 0, "<= 0")]
