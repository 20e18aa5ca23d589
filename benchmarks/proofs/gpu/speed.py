"""How fast the trainers are beside loops by hand: both are there at once and train a block of batches in turn.

So both see the same clocks and temperature, and compile at the same time. Ours runs under horovodrun on one rank.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from allstep.benchmarks.comparison.turns import Launch, run_in_turn
from allstep.benchmarks.harness.measure import BenchmarkFailed, Figure, TookTooLong, epoch_rates, job, median_ratio, run
from allstep.benchmarks.proofs.gpu import decode
from allstep.benchmarks.proofs.gpu.effort import Effort
from allstep.benchmarks.proofs.gpu.images import write_images
from allstep.benchmarks.records.files import read_json

NUM_THREADS = 4
# Launches of the same program on one GPU differ by 1 to 2 %.
AS_FAST = ">= 0.97"
SMALL_SHAPES = {"cnn": (28, 28, 1), "resnet18": (32, 32, 3)}


def rates_in_turn(commands: dict[str, Sequence[object]], effort: Effort, folder: Path) -> dict[str, list[float]]:
    """Images per second of each block of each command, by the commands' names.

    Raises:
        BenchmarkFailed: one did not end well.
    """
    folder.mkdir(parents=True)
    outputs = {name: folder / f"{name}.json" for name in commands}
    launches = []
    for name, command in commands.items():
        socket = folder / f"{name}.turns"
        words = [*command, "--turns", socket, "--output", outputs[name]]
        # Horovod polls, but a machine with a GPU has cores to spare for one rank.
        launches.append(Launch([list(map(str, words))], socket, polls=False))
    # Before the whole check is ended, so that what a job printed that does not end is seen.
    time_limit = 0.9 * effort.seconds
    outcomes = run_in_turn(launches, time_limit=time_limit, num_threads=NUM_THREADS, alone=False)
    for name, outcome in zip(commands, outcomes, strict=True):
        if outcome.status != "ok":
            kind = TookTooLong if outcome.status == "timeout" else BenchmarkFailed
            raise kind(f"{name}: {outcome.reason}\n{outcome.log}")
    return {name: _rates(json.loads(output.read_text())) for name, output in outputs.items()}


def _rates(measured: dict) -> list[float]:
    return [block["num_images"] / max(block["seconds_by_rank"]) for block in measured["blocks"]]


def large(framework: str, effort: Effort, folder: Path, *, compiled: bool) -> Figure:
    """ResNet-50 in bf16 on synthetic images."""
    flags = _flags("resnet50", effort.large_shape, effort.large_batch[framework], 1000, effort.num_batches, effort)
    flags += ["--precision", "bf16", *(["--compile"] if compiled else [])]
    what = f"{framework}: resnet50 bf16{' compiled' if compiled else ''}, images/s / by hand"
    return _beside_by_hand(what, framework, flags, effort, folder / f"large-{framework}-{compiled}", AS_FAST)


def small(framework: str, model: str, effort: Effort, folder: Path) -> Figure:
    """A network whose steps are bound by what starts them."""
    flags = _flags(model, SMALL_SHAPES[model], effort.small_batch[model], 10, 10 * effort.num_batches, effort)
    flags += ["--precision", "float32" if model == "cnn" else "bf16"]
    what = f"{framework}: {model}, images/s / by hand"
    return _beside_by_hand(what, framework, flags, effort, folder / f"small-{framework}-{model}", ">= 1.0")


def deterministic_cost(framework: str, effort: Effort, folder: Path) -> Figure:
    """What --deterministic costs; no bound, for nobody must pay it."""
    flags = _flags("resnet18", SMALL_SHAPES["resnet18"], effort.small_batch["resnet18"], 10, effort.num_batches, effort)
    ours = _ours(framework, [*flags, "--precision", "bf16"])
    rates = rates_in_turn({"with": [*ours, "--deterministic"], "without": ours}, effort, folder / f"cost-{framework}")
    what = f"{framework}: resnet18, images/s --deterministic / without"
    return _figure(what, rates["with"], rates["without"], "")


def real_images(effort: Effort, folder: Path) -> Figure:
    """Training from JPEG files beside training from images that lie on the device: what the input costs."""
    data, output = folder / "images", folder / "real"
    write_images(data, effort.num_images)
    batch = effort.large_batch["pytorch"]
    flags = _flags("resnet50", effort.large_shape, batch, 1000, effort.num_batches, effort)
    rates = rates_in_turn(
        {"synthetic": _ours("pytorch", [*flags, "--precision", "bf16"])}, effort, folder / "synthetic"
    )
    run(
        job(
            "allstep.pytorch.train",
            *("--dataset", "image-folder", "--data-dir", data, "--image-size", effort.large_shape[0]),
            *("--decode-threads", effort.decode_threads, "--model", "resnet50"),
            *("--precision", "bf16", "--batch-size", batch, "--base-lr", 1e-6, "--epochs", 4, "--drop-last"),
            *("--device", effort.device, "--output-dir", output),
            num_ranks=1,
        )
    )
    return _figure(
        "pytorch: resnet50 bf16, images/s JPEG files / synthetic", epoch_rates(output), rates["synthetic"], ">= 0.95"
    )


def decoding(effort: Effort, folder: Path) -> list[Figure]:
    """JPEG files by --decode gpu and by the CPU, with no network behind: how fast, and how far pixels are apart."""
    data, output, threads = folder / "images", folder / "decoding.json", effort.decode_threads
    write_images(data, effort.num_images // 4)
    flags = ("--data-dir", data, "--batch-size", effort.large_batch["pytorch"], "--image-size", effort.large_shape[0])
    run(job(decode.__name__, output, *flags, "--decode-threads", threads, "--device", effort.device, num_ranks=None))
    found = read_json(decode.Decoding, output)
    ours, cpu, apart = found.images_per_second, found.images_per_second_cpu, found.mean_difference
    return [
        Figure(f"JPEG files by --decode gpu: images/s / by {threads} threads of the CPU", ours, cpu, ours / cpu, ""),
        Figure("the same: how far pixels of 0 to 255 are apart on average", apart, 0, apart, "<= 2"),
    ]


def _flags(
    model: str, shape: Sequence[int], batch: int, num_classes: int, num_batches: int, effort: Effort
) -> list[object]:
    """Flags that ours and the loops by hand have in common."""
    return [
        *("--model", model, "--batch-size", batch, "--device", effort.device),
        *("--synthetic-shape", *shape, "--synthetic-classes", num_classes),
        *("--num-warmup-batches", effort.num_warmup, "--num-batches-per-iter", num_batches),
        *("--num-iters", effort.num_blocks),
    ]


def _ours(framework: str, flags: Sequence[object]) -> list[object]:
    return [*job("allstep.benchmarks.synthetic", num_ranks=1), "--framework", framework, *flags]


def _beside_by_hand(
    what: str, framework: str, flags: Sequence[object], effort: Effort, folder: Path, target: str
) -> Figure:
    by_hand = [*job(f"allstep.benchmarks.proofs.handwritten.{framework}_gpu", num_ranks=None), *flags]
    rates = rates_in_turn({"ours": _ours(framework, flags), "by-hand": by_hand}, effort, folder)
    return _figure(what, rates["ours"], rates["by-hand"], target)


def _figure(what: str, ours: Sequence[float], reference: Sequence[float], target: str) -> Figure:
    middle = statistics.median(ours), statistics.median(reference)
    ratio = median_ratio(ours, reference) if len(ours) == len(reference) else middle[0] / middle[1]
    return Figure(what, *middle, ratio, target)
