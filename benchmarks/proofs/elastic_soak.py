"""Whether an elastic job loses or doubles a sample, whatever befalls its ranks and hosts: `allstep soak --elastic`.

Four ranks on two hosts, which are both this machine under two names, train under `horovodrun --min-np 2`. Again and
again, when all four are there, one of them is killed or frozen, or a host leaves the list of hosts and returns. When
the minutes are over the job is asked to stop. What must hold:

    metrics.jsonl has every step of every epoch once, with the losses of an undisturbed run of one rank
    no process is left, and the job never stands still for more than two minutes

It reports the effective training time ratio (time in steps that counted over all time, Jiang et al. 2024, section 6),
and how long it took from each mishap until steps went on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.proofs.faults import CLEAN_SECONDS, Violation
from allstep.benchmarks.proofs.training import Training, rank_processes, training

BOTH_HOSTS, ONE_HOST = "localhost:2\n127.0.0.1:2\n", "localhost:2\n"
MISHAPS = ("a killed rank", "a frozen rank", "a host that leaves and returns")
FAULT_SECONDS = 6
PATIENCE_SECONDS = 120
POLL_SECONDS = 0.1
# Of sums over other numbers of ranks, in steps that amplify rounding.
LOSS_TOLERANCE = 1e-2
FLAGS = ("--model", "mlp", "--global-batch-size", 32, "--base-lr", 0.001, "--log-every", 1)


@dataclass(frozen=True)
class Stand:
    """How far a job has come."""

    num_starts: int = 0
    """How often its ranks were formed."""
    num_ranks: int = 0
    """Of the last time."""
    steps_since: int = 0
    """Steps since then."""


def soak(framework: str, minutes: float, chance: random.Random) -> None:
    """Disturb one job for so many minutes, and print what it took.

    Raises:
        Violation: something does not hold.
    """
    with tempfile.TemporaryDirectory() as directory:
        hosts, output_dir = Path(directory) / "hosts", Path(directory) / "run"
        hosts.write_text(BOTH_HOSTS)
        command = [
            *("horovodrun", "-np", 4, "--min-np", 2, "--max-np", 4, "--blacklist-cooldown-range", 1, 2),
            *("--host-discovery-script", f"cat {hosts}", "python", "-m", f"allstep.{framework}.train", *FLAGS),
            *("--elastic", "--commit-every", 10, "--epochs", 100_000, "--output-dir", output_dir),
            *("--fault-timeout", FAULT_SECONDS),
        ]
        started = time.monotonic()
        with training(command, output_dir, 4) as job:
            seconds = disturb(job, hosts, output_dir, started + 60 * minutes, chance)
            os.kill(next(iter(rank_processes(job.process.pid).values())), signal.SIGUSR1)
            if job.wait(PATIENCE_SECONDS):
                raise Violation(f"expected status 0, received {job.status}: {job.printed()}")
            total = time.monotonic() - started
            deadline = time.monotonic() + CLEAN_SECONDS
            while left := job.left():
                if time.monotonic() > deadline:
                    raise Violation(f"left the processes {left}: {job.printed()}")
                time.sleep(POLL_SECONDS)
        events = _events(output_dir)
        num_epochs, num_steps = check_steps(events)
        check_curve(framework, events, num_epochs, Path(directory) / "undisturbed")
        useful = max(event["cumulative_seconds"] for event in events if event["event"] == "epoch")
        print(
            f"{framework}: {len(seconds)} mishaps, {num_steps} steps of {num_epochs} epochs, none lost or doubled; "
            f"effective training time ratio {useful / total:.2f}; steps went on after "
            f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (worst)",
            flush=True,
        )


def disturb(job: Training, hosts: Path, output_dir: Path, until: float, chance: random.Random) -> list[float]:
    """Let mishaps happen until then; returns the seconds from each to the next step."""
    seconds = []
    while True:
        before = _wait(job, output_dir, lambda stand: stand.num_ranks == 4 and stand.steps_since > 20)
        if time.monotonic() > until:
            return seconds
        time.sleep(chance.uniform(0, 1))
        kind, started = chance.choice(MISHAPS), time.monotonic()
        if kind == MISHAPS[2]:
            hosts.write_text(ONE_HOST)
        else:
            number = signal.SIGKILL if kind == MISHAPS[0] else signal.SIGSTOP
            os.kill(chance.choice(list(rank_processes(job.process.pid).values())), number)
        num_starts = before.num_starts
        _wait(job, output_dir, lambda stand, n=num_starts: stand.num_starts > n and stand.steps_since > 0)
        seconds.append(time.monotonic() - started)
        print(f"{kind}: steps went on after {seconds[-1]:.1f} s", flush=True)
        if kind == MISHAPS[2]:
            hosts.write_text(BOTH_HOSTS)


def check_steps(events: Sequence[dict]) -> tuple[int, int]:
    """How many epochs and steps there are, each once and in order.

    Raises:
        Violation: one is missing, or there twice.
    """
    for kind in ("step", "epoch"):
        numbers = [event[kind] for event in events if event["event"] == kind]
        if numbers != list(range(1, len(numbers) + 1)):
            raise Violation(f"expected each {kind} once and in order, received {numbers}")
    epochs, steps = (len([event for event in events if event["event"] == kind]) for kind in ("epoch", "step"))
    return epochs, steps


def check_curve(framework: str, events: Sequence[dict], num_epochs: int, output_dir: Path) -> None:
    """Compare losses with those of one rank that nothing disturbs.

    Raises:
        Violation: they differ by more than rounding.
    """
    command = [*("python", "-m", f"allstep.{framework}.train", "--strategy", "single", *FLAGS)]
    with training([*command, "--epochs", num_epochs, "--output-dir", output_dir], output_dir, 1) as job:
        if job.wait(600):
            raise Violation(f"the undisturbed run failed: {job.printed()}")
    expected = {event["step"]: event["loss"] for event in _events(output_dir) if event["event"] == "step"}
    for event in events:
        if event["event"] == "step" and event["step"] in expected:
            loss = expected[event["step"]]
            if abs(event["loss"] - loss) > LOSS_TOLERANCE * max(loss, 0.01):
                raise Violation(f"expected a loss of {loss} at step {event['step']}, received {event['loss']}")


def _wait(job: Training, output_dir: Path, is_there: Callable[[Stand], bool]) -> Stand:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there(stand := _stand(output_dir)):
        if job.status is not None:
            raise Violation(f"ended with status {job.status}: {job.printed()}")
        if time.monotonic() > deadline:
            raise Violation(f"stands still at {stand}: {job.printed()}")
        time.sleep(POLL_SECONDS)
    return stand


def _stand(output_dir: Path) -> Stand:
    stand = Stand()
    for event in _events(output_dir):
        if event["event"] == "start":
            stand = Stand(stand.num_starts + 1, event["world_size"])
        elif event["event"] == "step":
            stand = Stand(stand.num_starts, stand.num_ranks, stand.steps_since + 1)
    return stand


def _events(output_dir: Path) -> list[dict]:
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be under way
