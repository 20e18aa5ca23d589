"""Compare the speed of the trainers with hand-written loops: all jobs run at once and train blocks of batches in turn.

They thus have the same clocks and temperature, and compile at the same time. Ours run under horovodrun on one rank.
"""

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from allstep.benchmarks.figures import compared, missing
from allstep.benchmarks.gpu import decode
from allstep.benchmarks.gpu.effort import Effort
from allstep.commands.shared.measure import epoch_rates, job, run
from allstep.commands.shared.records.files import read_json
from allstep.commands.shared.records.measured import Figure, Measured
from allstep.commands.shared.turns import Launch, run_in_turn

WIDTH, HEIGHT = 500, 375
NUM_CLASSES = 10
VALIDATION_SHARE = 20  # training images per validation image


def write_images(folder: Path, number: int) -> None:
    """Write training images under folder/train and a few validation images under folder/val, by class."""
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            (folder / split / f"class{label}").mkdir(parents=True)
    last = number + max(NUM_CLASSES, number // VALIDATION_SHARE)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(partial(_write, folder, number), range(last), chunksize=32))


def _write(folder: Path, num_training: int, index: int) -> None:
    """Write an image of coarse colours with noise over them; mere noise would not compress like photographs."""
    generator = np.random.default_rng(index)
    coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    noisy = smooth + generator.normal(scale=14, size=smooth.shape)
    split = "train" if index < num_training else "val"
    file = folder / split / f"class{index % NUM_CLASSES}" / f"{index}.jpg"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=90)


NUM_THREADS = 4
# Launches of the same program on one GPU differ by 1 to 2 %.
AS_FAST = ">= 0.97"
SMALL_SHAPES = {"cnn": (28, 28, 1), "resnet18": (32, 32, 3)}
SMALL_NETWORKS = {"pytorch": ("cnn", "resnet18"), "tensorflow": ("cnn",)}
"""Networks that are compared with hand-written loops; the CNN with and without --compile."""

Rates = Mapping[str, Sequence[float]]
"""Images per second of each block, by the names of the commands that succeeded."""


def rates_in_turn(commands: Mapping[str, Sequence[object]], effort: Effort, folder: Path) -> Rates:
    """Run commands in turn and return their rates; commands that fail are reported on stderr and left out."""
    folder.mkdir(parents=True)
    outputs = {name: folder / f"{name}.json" for name in commands}
    launches = []
    for name, command in commands.items():
        socket = folder / f"{name}.turns"
        words = [*command, "--turns", socket, "--output", outputs[name]]
        # Horovod polls, but a machine with a GPU has cores to spare for one rank.
        launches.append(Launch([list(map(str, words))], socket, polls=False))
    # Less than the time of the whole check, so that the output of a job that hangs is shown.
    time_limit = 0.9 * effort.seconds
    outcomes = run_in_turn(launches, time_limit=time_limit, num_threads=NUM_THREADS, starting=len(launches))
    rates = {}
    for name, outcome in zip(commands, outcomes, strict=True):
        if outcome.status == "ok":
            rates[name] = [block.images_per_second for block in read_json(Measured, outputs[name]).blocks]
        else:
            print(f"{name}: {outcome.reason}\n{outcome.log}", file=sys.stderr)
    return rates


def large(framework: str, effort: Effort, folder: Path, *, compiled: bool) -> list[Figure]:
    """Measure ResNet-50 in bf16 on synthetic images."""
    flags = _flags("resnet50", effort.large_shape, effort.large_batch[framework], 1000, effort.num_batches, effort)
    flags += ["--precision", "bf16", *(["--compile"] if compiled else [])]
    what = f"{framework}: resnet50 bf16{' compiled' if compiled else ''}, images/s / by hand"
    rates = rates_in_turn({"ours": _ours(framework, flags), "hand": _by_hand(framework, flags)}, effort, folder / "it")
    return [_figure(what, rates, "ours", "hand", AS_FAST)]


def small(framework: str, effort: Effort, folder: Path) -> list[Figure]:
    """Measure networks whose steps are bound by launch overhead, also with --compile and --deterministic."""
    commands: dict[str, Sequence[object]] = {}
    for model, shape in SMALL_SHAPES.items():
        flags = _flags(model, shape, effort.small_batch[model], 10, 5 * effort.num_batches, effort)
        flags += ["--precision", "float32" if model == "cnn" else "bf16"]
        commands[model] = _ours(framework, flags)
        if model in SMALL_NETWORKS[framework]:
            commands[f"{model}-hand"] = _by_hand(framework, flags)
        if model == "cnn":
            commands[f"{model}-compiled"] = [*commands[model], "--compile"]
            commands[f"{model}-compiled-hand"] = [*commands[f"{model}-hand"], "--compile"]
        else:
            commands[f"{model}-deterministic"] = [*commands[model], "--deterministic"]
    rates = rates_in_turn(commands, effort, folder / "it")
    return [
        *(
            _figure(f"{framework}: {model}, images/s / by hand", rates, model, f"{model}-hand", ">= 1.0")
            for model in SMALL_NETWORKS[framework]
        ),
        _figure(f"{framework}: cnn compiled, images/s / by hand", rates, "cnn-compiled", "cnn-compiled-hand", ">= 1.0"),
        _figure(f"{framework}: cnn, images/s --compile / without", rates, "cnn-compiled", "cnn", ">= 1.0"),
        _figure(
            f"{framework}: resnet18, images/s --deterministic / without", rates, "resnet18-deterministic", "resnet18"
        ),
    ]


def real_images(effort: Effort, folder: Path) -> list[Figure]:
    """Compare training from JPEG files with training from images on the device, to show what the input costs."""
    data, output = folder / "images", folder / "real"
    write_images(data, effort.num_images)
    batch = effort.large_batch["pytorch"]
    flags = _flags("resnet50", effort.large_shape, batch, 1000, effort.num_batches, effort)
    commands = {"synthetic": _ours("pytorch", [*flags, "--precision", "bf16"])}
    rates = rates_in_turn(commands, effort, folder / "synthetic")
    train = (
        *("--dataset", "image-folder", "--data-dir", data, "--image-size", effort.large_shape[0]),
        *("--decode-threads", effort.decode_threads, "--model", "resnet50"),
        *("--precision", "bf16", "--batch-size", batch, "--base-lr", 1e-6, "--epochs", 3, "--drop-last"),
        *("--device", effort.device, "--output-dir", output),
    )
    run(job("allstep.pytorch.train", *train, num_ranks=1))
    what = "pytorch: resnet50 bf16, images/s JPEG files / synthetic"
    return [_figure(what, {**rates, "real": epoch_rates(output)}, "real", "synthetic", ">= 0.95")]


def decoding(effort: Effort, folder: Path) -> list[Figure]:
    """Compare rates and pixels of JPEG files decoded by --decode gpu and by the CPU, without training."""
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
    """Return the flags that our jobs and the hand-written loops have in common."""
    return [
        *("--model", model, "--batch-size", batch, "--device", effort.device),
        *("--synthetic-shape", *shape, "--synthetic-classes", num_classes),
        *("--num-warmup-batches", effort.num_warmup, "--num-batches-per-iter", num_batches),
        *("--num-iters", effort.num_blocks),
    ]


def _ours(framework: str, flags: Sequence[object]) -> list[object]:
    return [*job("allstep.commands.compare.synthetic", num_ranks=1), "--framework", framework, *flags]


def _by_hand(framework: str, flags: Sequence[object]) -> list[object]:
    return [*job(f"allstep.benchmarks.handwritten.{framework}_gpu", num_ranks=None), *flags]


def _figure(what: str, rates: Rates, ours: str, reference: str, target: str = "") -> Figure:
    """Return the ratio of the rates of two commands, or a row that reports which of them has failed."""
    if failed := [name for name in (ours, reference) if name not in rates]:
        return missing(what, f"{' and '.join(failed)} failed")
    one, other = rates[ours], rates[reference]
    if len(one) == len(other):
        return compared(what, one, other, target=target)
    return compared(what, [statistics.median(one)], [statistics.median(other)], target=target)
