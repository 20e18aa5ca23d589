"""Measure which share of the time to the first step the trial of a network takes (`pytorch/other_networks.py`):

    python -m allstep.benchmarks.trial_pass [--models NAME,...] [--rounds N] [--output FILE]

Each network trains one step of 32 images of 64 x 64 pixels in a process of its own; the figure is the median over the
rounds. The exit status is 0 if all targets are reached, 1 otherwise.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from allstep.benchmarks.runner import benchmark, program
from allstep.commands.shared.measure import compared
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import listed, nonempty_text
from allstep.common.process.exit import run_rank

MODELS = ("timm:resnet10t", "timm:resnet50", "timm:vit_tiny_patch16_224", "torchvision:mobilenet_v3_small")
_FLAGS = {"--models": {"type": listed(nonempty_text), "default": MODELS, "metavar": "NAME,..."}}


def time_trial(model: str, started: str) -> None:
    """Train a step in this process, which began at `started`; print the seconds of the trial and to the first step."""
    from allstep.common.training.hooks import Hook
    from allstep.pytorch import other_networks, train

    trial, seconds, first_steps = other_networks._outputs, list[float](), list[float]()

    def timed(*arguments: object, **options: object) -> object:
        begin = time.time()
        try:
            return trial(*arguments, **options)  # pyright: ignore[reportArgumentType]
        finally:
            seconds.append(time.time() - begin)

    class FirstStep(Hook):
        def on_step(self, session: object) -> None:
            first_steps.append(time.time() - float(started))

    flags = ("--dataset", "synthetic", "--synthetic-samples", "32", "--synthetic-shape", "64", "64", "3")
    with mock.patch.object(other_networks, "_outputs", timed):
        train.main(["--model", model, *flags, "--batch-size", "32", "--epochs", "1"], [FirstStep()])
    print(json.dumps([sum(seconds), *first_steps]))


def seconds_of(model: str) -> list[float]:
    """Return the seconds of the trial, and those to the first step, of a new process."""
    command = [sys.executable, *program("trial_pass", "time_trial", model, time.time())[1:]]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    trial, total = json.loads(output.splitlines()[-1])
    print(f"{model}: trial {trial:.3f} s, first step after {total:.2f} s", file=sys.stderr, flush=True)
    return [trial, total]


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return a row for each network, and its seconds in each round."""
    samples = {model: [seconds_of(model) for _ in range(flags.rounds)] for model in flags.models}
    return [
        compared(f"{model}: seconds of the trial / to the first step", *zip(*pairs, strict=True), target="<= 0.03")
        for model, pairs in samples.items()
    ], samples


main = benchmark("trial_pass", __doc__, measure, frameworks=["pytorch"], rounds=3, flags=_FLAGS, programs=(time_trial,))

if __name__ == "__main__":
    run_rank(main)
