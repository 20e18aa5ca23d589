"""Measure which share of the time to the first step the trial of a network takes (`pytorch/other_networks.py`):

    python -m allstep.benchmarks.trial_pass [MODEL...]

Each network trains one step of 32 images of 64 x 64 pixels in a process of its own, three times; the figure is the
median. The exit status is 0 if all are below 3 %, 1 otherwise.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from unittest import mock

from allstep.common.process.exit import run_rank

MODELS = ("timm:resnet10t", "timm:resnet50", "timm:vit_tiny_patch16_224", "torchvision:mobilenet_v3_small")
ROUNDS, MAX_SHARE = 3, 0.03
_PRINTED = "trial and first step:"


def measure(model: str, started: float) -> None:
    """Train a step in this process, which began at `started`, and print both times in seconds."""
    from allstep.common.training.hooks import Hook
    from allstep.pytorch import other_networks, train

    trial, seconds = other_networks._outputs, list[float]()

    def timed(*arguments: object) -> object:
        begin = time.time()
        try:
            return trial(*arguments)  # pyright: ignore[reportArgumentType]
        finally:
            seconds.append(time.time() - begin)

    class FirstStep(Hook):
        def on_step(self, session: object) -> None:
            print(_PRINTED, sum(seconds), time.time() - started)

    flags = ("--dataset", "synthetic", "--synthetic-samples", "32", "--synthetic-shape", "64", "64", "3")
    with mock.patch.object(other_networks, "_outputs", timed):
        train.main(["--model", model, *flags, "--batch-size", "32", "--epochs", "1"], [FirstStep()])


def share_of(model: str) -> float:
    """Return the share of the trial in the time to the first step of a new process."""
    command = [sys.executable, "-m", "allstep.benchmarks.trial_pass", "--started", str(time.time()), model]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [line] = [line for line in output.splitlines() if line.startswith(_PRINTED)]
    trial, total = map(float, line.removeprefix(_PRINTED).split())
    print(f"{model}: trial {trial:.3f} s, first step after {total:.2f} s: {trial / total:.1%}", flush=True)
    return trial / total


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the networks, each in a process of its own; `--started SECONDS MODEL` is such a process."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--started"]:
        measure(words[2], float(words[1]))
        return
    shares = {name: statistics.median(share_of(name) for _ in range(ROUNDS)) for name in words or MODELS}
    for name, share in shares.items():
        print(f"{name}: {share:.1%} of the time to the first step, at most {MAX_SHARE:.0%}")
    sys.exit(any(share > MAX_SHARE for share in shares.values()))


if __name__ == "__main__":
    run_rank(main)
