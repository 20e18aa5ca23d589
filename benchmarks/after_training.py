"""Compare what follows training with programs written by hand:

    python -m allstep.benchmarks.after_training [--pictures N] [--rounds N] [--output FILE]

    evaluate / hand-written     images/s of ResNet-18 on JPEG files, against `handwritten/trained.py`
    evaluate, 2 ranks / 1       images/s, a core a rank
    metrics / validation        seconds of four metrics, of the seconds of a validation by ResNet-18
    load                        seconds of allstep.load for a ResNet-50 (100 MB), without imports
    predict                     milliseconds for a picture, beyond those of its preprocessing and the bare network

Images/s are those of N pictures, in the seconds that a command takes longer than on 32 pictures. Figures are medians
over the rounds. The exit status is 0 if all targets are reached, 1 otherwise.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from allstep.benchmarks.gpu.speed import write_images
from allstep.benchmarks.handwritten.trained import BATCH_SIZE, IMAGE_SIZE
from allstep.benchmarks.runner import benchmark, program
from allstep.commands.shared.measure import compared, interleaved, job, median_difference, run
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import whole
from allstep.common.process.exit import run_rank

_FLAGS = {"--pictures": {"type": whole(32, 100_000), "default": 600, "help": "JPEG files to evaluate (600)"}}
_FEW = BATCH_SIZE
_METRICS = ("accuracy", "top-2", "f1", "confusion-matrix")
_NUM_PREDICTIONS = 30


def write_run(folder: Path, output: Path) -> Path:
    """Train torchvision's network of that name for a step on the pictures, and return the run's output directory."""
    data = ("--dataset", "image-folder", "--data-dir", folder, "--image-size", IMAGE_SIZE)
    epoch = ("--batch-size", BATCH_SIZE, "--epochs", 1, "--output-dir", output)
    run(job("allstep.pytorch.train", "--model", f"torchvision:{output.name}", *data, *epoch, num_ranks=None))
    return output


def rates(folder: Path, trained: Path, number: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure the images/s of each side, by name."""

    def rate(command: Callable[[str], Sequence[str]]) -> Callable[[], float]:
        def measure() -> float:
            ends = [time.perf_counter()]
            for part in ("train", "validation"):  # few pictures, and all others
                run(command(part))
                ends.append(time.perf_counter())
            return (number - _FEW) / ((ends[2] - ends[1]) - (ends[1] - ends[0]))

        return measure

    def ours(part: str, ranks: int | None = None) -> list[str]:
        return job("allstep.commands.cli", "evaluate", trained, "--split", part, num_ranks=ranks)

    def by_hand(part: str) -> list[str]:
        pictures = folder / {"train": "train", "validation": "val"}[part]
        return job("allstep.benchmarks.handwritten.trained", pictures, trained / "checkpoints", num_ranks=None)

    return {
        "evaluate": rate(ours),
        "hand-written": rate(by_hand),
        "two ranks": rate(lambda part: ours(part, 2)),
        "one rank": rate(lambda part: ["taskset", "-c", "0", *ours(part)]),
    }


def time_metrics(trained: str) -> None:
    """Evaluate a run in this process, and print the seconds of its metrics and of the whole validation."""
    from allstep.commands.evaluate import command
    from allstep.common.training import metrics
    from allstep.common.training.training_run import TrainingRun

    seconds = {}

    def timed(owner: type, name: str) -> None:
        untimed, seconds[name] = getattr(owner, name), 0.0

        def measure(*arguments: object, **options: object) -> object:
            started = time.perf_counter()
            try:
                return untimed(*arguments, **options)
            finally:
                seconds[name] += time.perf_counter() - started

        setattr(owner, name, measure)

    timed(metrics.Tally, "add")
    timed(metrics.Metrics, "compute")
    timed(TrainingRun, "evaluate")
    command.main([trained, "--metrics", *_METRICS])
    print(json.dumps([seconds["add"] + seconds["compute"], seconds["evaluate"]]))


def time_load(trained: str, picture: str) -> None:
    """Print the seconds of allstep.load, and the milliseconds of predict, and of its parts without it."""
    import torch
    import torchvision  # noqa: F401 (imports are not part of the time)
    from PIL import Image

    from allstep.common.api.load import load

    started = time.perf_counter()
    network = load(trained)
    loaded = time.perf_counter() - started
    image = Image.open(picture).copy()

    def bare() -> None:
        with torch.inference_mode():
            network.model(torch.as_tensor(network.preprocess(image)))

    seconds: dict[str, list[float]] = {"predict": [], "bare": []}
    for _ in range(_NUM_PREDICTIONS):
        for name, function in (("predict", lambda: network.predict(image)), ("bare", bare)):
            started = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started)
    print(json.dumps([loaded, *(statistics.median(each[1:]) * 1e3 for each in seconds.values())]))


def numbers(function: str, *arguments: object) -> list[float]:
    """Return the numbers that a program of this file prints in a process of its own."""
    [printed] = run(program("after_training", function, *arguments))
    return json.loads(printed.splitlines()[-1])


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows and the samples of each round."""
    pictures = folder / "pictures"
    write_images(pictures, _FEW, flags.pictures)
    small, large = (write_run(pictures, folder / name) for name in ("resnet18", "resnet50"))
    speed = interleaved(rates(pictures, small, flags.pictures), flags.rounds)
    picture = pictures / "train" / "class0" / "0.jpg"
    metrics = list(zip(*(numbers("time_metrics", small) for _ in range(flags.rounds)), strict=True))
    load, predict, bare = zip(*(numbers("time_load", large, picture) for _ in range(flags.rounds)), strict=True)
    rows = [
        compared("images/s: evaluate / hand-written", speed["evaluate"], speed["hand-written"], target=">= 1.0"),
        compared("images/s: evaluate, 2 ranks / 1", speed["two ranks"], speed["one rank"], target=">= 1.8"),
        compared("seconds: metrics / validation", *metrics, target="<= 0.01"),
        compared("seconds: load", load, [1.0] * len(load), target="<= 1"),
        compared("ms: predict - bare", predict, bare, target="<= 2", by=median_difference),
    ]
    return rows, {**speed, "metrics": metrics, "load": load, "predict": predict, "bare": bare}


main = benchmark(
    "after_training",
    __doc__,
    measure,
    frameworks=["pytorch"],
    rounds=3,
    flags=_FLAGS,
    programs=(time_metrics, time_load),
)

if __name__ == "__main__":
    run_rank(main)
