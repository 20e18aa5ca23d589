"""Measure which share of the time to the first step the trial of a network takes (`pytorch/trial.py`):

    python -m allstep.benchmarks.trial_pass [--models NAME,...] [--side N] [--rounds N] [--output FILE]

Each network trains a step of 32 images in a process of its own; the figure is the median of the rounds. `user:NAME` is
timm's network of that name from a user's file, in two passes a step: what several ranks would change is tried as well,
which takes the longest. The exit status is 0 if all targets are reached, 1 otherwise.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from allstep.benchmarks.figures import compared
from allstep.benchmarks.runner import benchmark, program
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import listed, nonempty_text, whole
from allstep.common.process.exit import run_rank

_OF_LIBRARIES = ("timm:resnet10t", "timm:resnet50", "timm:vit_tiny_patch16_224", "torchvision:mobilenet_v3_small")
MODELS = (*_OF_LIBRARIES, "user:resnet18", "user:resnet50", "user:vit_tiny_patch16_224")
_FLAGS = {
    "--models": {"type": listed(nonempty_text), "default": MODELS, "metavar": "NAME,..."},
    "--side": {"type": whole(32, 512), "default": 64, "metavar": "N", "help": "pixels of a side of the images (64)"},
}
_FILE = """
import timm

def build(input_shape, num_classes, *, name):
    size = {"img_size": input_shape[0]} if name.startswith("vit") else {}
    return timm.create_model(name, num_classes=num_classes, **size)
"""


def time_trial(model: str, side: str, folder: str, started: str) -> None:
    """Train a step in this process, which began at `started`; print the seconds of the trial and to the first step."""
    from allstep.common.training.hooks import Hook
    from allstep.pytorch import other_networks, train

    trial, seconds, first_steps = other_networks.try_network, list[float](), list[float]()

    def timed(*arguments: object, **options: object) -> object:
        begin = time.time()
        try:
            return trial(*arguments, **options)  # pyright: ignore[reportArgumentType]
        finally:
            seconds.append(time.time() - begin)

    class FirstStep(Hook):
        def on_step(self, session: object) -> None:
            first_steps.append(time.time() - float(started))

    flags = ["--dataset", "synthetic", "--synthetic-samples", "32", "--synthetic-shape", side, side, "3"]
    library, _, name = model.partition(":")
    if library == "user":
        file = Path(folder, "users.py")
        file.write_text(_FILE)
        model = f"{file}:build"
        flags += ["--model-args", f"name={name}", "--accumulate-steps", "2", "--batch-size", "16"]
    with mock.patch.object(other_networks, "try_network", timed):
        train.main(["--model", model, "--batch-size", "32", *flags, "--epochs", "1"], [FirstStep()])
    print(json.dumps([sum(seconds), *first_steps]))


def seconds_of(model: str, side: int, folder: Path) -> list[float]:
    """Return the seconds of the trial, and those to the first step, of a new process."""
    command = [sys.executable, *program("trial_pass", "time_trial", model, side, folder, time.time())[1:]]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    trial, total = json.loads(output.splitlines()[-1])
    print(f"{model}: trial {trial:.3f} s, first step after {total:.2f} s", file=sys.stderr, flush=True)
    return [trial, total]


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return a row for each network, and its seconds in each round."""
    samples = {model: [seconds_of(model, flags.side, folder) for _ in range(flags.rounds)] for model in flags.models}
    return [
        compared(f"{model}: seconds of the trial / to the first step", *zip(*pairs, strict=True), target="<= 0.03")
        for model, pairs in samples.items()
    ], samples


main = benchmark("trial_pass", __doc__, measure, frameworks=["pytorch"], rounds=3, flags=_FLAGS, programs=(time_trial,))

if __name__ == "__main__":
    run_rank(main)
