"""Whether a run that is killed at any moment and resumed ends where the undisturbed run ends.

    allstep soak [--kills 50] [--seed 0] [--frameworks pytorch,tensorflow] [--ranks 1,2,3]

Trains on digits, kills a random rank by SIGKILL at a random moment (starting up, stepping, validating, writing a
checkpoint), resumes, kills again, and lets the run end after one to four kills. A run goes on on the same number of
ranks or, if it is a `mixed` one, on another number each time. After each kill:

    every checkpoint under its name is whole, and has the weights of the undisturbed run at its step

and at the end:

    the weights are those of the undisturbed run: bit by bit in PyTorch where the number of ranks stayed the same,
    else by a relative difference (see `allstep parity --help`) of at most 1e-6
    metrics.jsonl tells every step and every epoch once, with the losses of the undisturbed run

Horovod fuses gradients that are ready at the same time into one all-reduce. From three ranks on, where a gradient
lies in that decides in which order the ranks' values are added, so equal runs differ in last bits. Here every gradient
travels alone (HOROVOD_FUSION_THRESHOLD=0), and equal runs are equal. The exit status is 0 where all held, 1 else.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from allstep.benchmarks import parity
from allstep.benchmarks.measure import environment, job
from allstep.benchmarks.parity import Curve, weights_apart
from allstep.common.checkpoint import load
from allstep.common.cli import Parser, at_least, listed
from allstep.common.errors import UserError

NUM_EPOCHS = 2
NUM_STEPS = NUM_EPOCHS * parity.STEPS_PER_EPOCH
FINAL_BOUND = 1e-6
# On other numbers of ranks than the undisturbed run's: while they are small, weights differ more, relatively.
BOUND_ON_THE_WAY = parity.Bounds.ranks
MOST_KILLS_A_RUN = 4
START_UP_SHARE = 0.15
"""Of the kills, those before the first step."""
START_UP_SECONDS = 3.0
POLL_SECONDS = 0.002
STEP_SECONDS = 0.05
"""The longest wait from the step at which a kill is due to the kill: a few steps, with their checkpoints."""
JOB_SECONDS = 300


class Violation(Exception):
    """What must hold does not; the message says what and where."""


@dataclass(frozen=True)
class Case:
    """How a run that will be killed is made."""

    framework: str
    ranks: tuple[int, ...]
    """Numbers of ranks to choose from at each start; one where it stays the same."""

    @property
    def reference_ranks(self) -> int:
        """Number of ranks of the undisturbed run to compare with."""
        return self.ranks[0]

    @property
    def exact(self) -> bool:
        """Whether every bit must be that of the undisturbed run."""
        return self.framework == "pytorch" and len(self.ranks) == 1

    def __str__(self) -> str:
        return f"{self.framework}, {'mixed' if len(self.ranks) > 1 else self.ranks[0]} ranks"


def main(arguments: Sequence[str]) -> None:
    """Kill and resume until the kills are used up; end with status 1 where anything was violated."""
    parser = Parser("soak", __doc__)
    parser.add_argument("--kills", type=at_least(1), default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all random choices but the exact moment")
    parser.add_argument(
        "--frameworks", type=listed(str, parity.FRAMEWORKS), default=parity.FRAMEWORKS, metavar="NAME,..."
    )
    parser.add_argument("--ranks", type=listed(at_least(1)), default=(1, 2, 3), metavar="N,...")
    flags = parser.parse_args(arguments)

    chance = random.Random(flags.seed)
    undisturbed: dict[tuple[str, int], Curve] = {}
    kills: list[Kill] = []
    violations = 0
    for case in cases(flags.frameworks, flags.ranks, chance):
        if len(kills) == flags.kills:
            break
        key = case.framework, case.reference_ranks
        if key not in undisturbed:
            undisturbed[key] = train_undisturbed(*key)
        budget = min(chance.randint(1, MOST_KILLS_A_RUN), flags.kills - len(kills))
        try:
            for kill in endure(case, undisturbed[key], budget, chance):
                kills.append(kill)
                print(f"kill {len(kills)}/{flags.kills}: {case}: {kill}", flush=True)
            print(f"{case}: ended as if undisturbed", flush=True)
        except Violation as violation:
            violations += 1
            print(f"VIOLATION: {case}: {violation}", flush=True)
    in_writing = sum(kill.in_writing for kill in kills)
    print(f"{len(kills)} kills, {in_writing} of them while a checkpoint was written; {violations} violations")
    if violations:
        sys.exit(1)


def cases(frameworks: Sequence[str], ranks: Sequence[int], chance: random.Random) -> Iterator[Case]:
    """All cases in random order, the frameworks in turn, again and again."""
    choices = [(num,) for num in ranks] + ([tuple(ranks)] if len(ranks) > 1 else [])
    while True:
        shuffled = [[Case(framework, of) for of in chance.sample(choices, len(choices))] for framework in frameworks]
        yield from itertools.chain.from_iterable(zip(*shuffled, strict=True))


@dataclass(frozen=True)
class Kill:
    """One that happened."""

    rank: int
    num_ranks: int
    last_step: int
    """Told in metrics.jsonl."""
    saved_step: int
    """Of the latest checkpoint; 0 without any."""
    in_writing: bool
    """Whether it left a checkpoint half written."""

    def __str__(self) -> str:
        moment = ", writing a checkpoint" if self.in_writing else ""
        return f"rank {self.rank} of {self.num_ranks} at step {self.last_step}{moment}; saved is step {self.saved_step}"


def endure(case: Case, undisturbed: Curve, budget: int, chance: random.Random) -> Iterator[Kill]:
    """Kill one run `budget` times, checking what it left each time, then let it end and check that.

    Raises:
        Violation: something does not hold.
    """
    with tempfile.TemporaryDirectory() as directory:
        output_dir = Path(directory)
        flags = ("--checkpoint-every", chance.choice([1, 2, 7]))
        saved_step = 0
        while True:
            num_ranks = chance.choice(case.ranks)
            resume = ("--resume", "latest") if saved_step else ()
            # So that the kills of a run spread over all of it.
            target = chance.randint(saved_step, saved_step + (NUM_STEPS - saved_step) // max(1, budget))
            rank, starting_up = chance.randrange(num_ranks), chance.random() < START_UP_SHARE
            with training(case.framework, num_ranks, output_dir, *flags, *resume) as run:
                if budget:
                    delay = chance.uniform(0, START_UP_SECONDS if starting_up else STEP_SECONDS)
                    run.wait_for_step(0 if starting_up else target, delay)
                    killed = run.kill(rank)
                else:
                    killed = False
                run.wait()
                if not killed and run.status:
                    raise Violation(f"ended with status {run.status}: {run.output()}")
            if not killed:
                break
            budget -= 1
            in_writing = any((output_dir / "checkpoints").glob(".tmp-*"))
            saved_step = check_checkpoints(case, output_dir, undisturbed)
            yield Kill(rank, num_ranks, last_step(output_dir), saved_step, in_writing)
        check_end(case, output_dir, undisturbed)


def check_checkpoints(case: Case, output_dir: Path, undisturbed: Curve) -> int:
    """The step of the latest checkpoint, 0 without any; all of them must be whole and right."""
    latest = 0
    try:
        for path in sorted((output_dir / "checkpoints").glob("step-*")):
            state = load(path, output_dir, warn=_refuse)
            latest = state.progress.step
            _check_weights(case, parity.weights_of(state), undisturbed, latest, BOUND_ON_THE_WAY)
        if latest and load("latest", output_dir / "checkpoints", warn=_refuse).progress.step != latest:
            raise Violation("latest is not the checkpoint of the highest step")
    except UserError as error:
        raise Violation(str(error)) from None
    return latest


def check_end(case: Case, output_dir: Path, undisturbed: Curve) -> None:
    """What must hold of a run that has ended."""
    if check_checkpoints(case, output_dir, undisturbed) != NUM_STEPS:
        raise Violation("the last step has no checkpoint")
    state = load("latest", output_dir / "checkpoints", warn=_refuse)
    _check_weights(case, parity.weights_of(state), undisturbed, NUM_STEPS, FINAL_BOUND)
    events = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    told = {name: [event for event in events if event["event"] == name] for name in ("step", "epoch", "end")}
    for name, number in (("step", NUM_STEPS), ("epoch", NUM_EPOCHS)):
        if [event[name] for event in told[name]] != list(range(1, number + 1)):
            raise Violation(f"metrics.jsonl tells the {name}s {[event[name] for event in told[name]]}")
    if len(told["end"]) != 1:
        raise Violation(f"metrics.jsonl tells the end {len(told['end'])} times")
    bound = 0.0 if case.exact else BOUND_ON_THE_WAY
    for event in told["step"]:
        expected = undisturbed.losses[event["step"]]
        if not math.isclose(event["loss"], expected, rel_tol=bound):
            raise Violation(f"expected a loss of {expected} at step {event['step']}, received {event['loss']}")


def _check_weights(case: Case, weights: dict, undisturbed: Curve, step: int, bound: float) -> None:
    apart = weights_apart(undisturbed.weights[step], weights)
    if not apart <= (0.0 if case.exact else bound):
        raise Violation(f"the weights of step {step} differ from the undisturbed run's by {apart:.1e}")


def _refuse(warning: str) -> None:
    raise Violation(f"unexpected warning: {warning}")


def train_undisturbed(framework: str, num_ranks: int) -> Curve:
    """The run to compare with, with the weights of every step.

    Raises:
        Violation: it failed.
    """
    print(f"{framework}, {num_ranks} ranks: undisturbed", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        flags = ("--checkpoint-every", 1, "--keep-checkpoints", NUM_STEPS)
        with training(framework, num_ranks, Path(directory), *flags) as run:
            run.wait()
            if run.status:
                raise Violation(f"ended with status {run.status}: {run.output()}")
        return parity.read_curve(Path(directory), NUM_STEPS)


@contextmanager
def training(framework: str, num_ranks: int, output_dir: Path, *flags: str | int) -> Iterator[Training]:
    """A job of a trainer, alone on one rank; it has ended when the block ends."""
    with tempfile.TemporaryFile() as log:
        run = Training(framework, num_ranks, output_dir, *flags, log=log)
        try:
            yield run
        finally:
            run.process.terminate()  # horovodrun passes it on; nothing happens where the job has ended
            run.process.wait()


class Training:
    """A trainer's job that has been started."""

    def __init__(self, framework: str, num_ranks: int, output_dir: Path, *flags: str | int, log: IO[bytes]) -> None:
        self._log, self._num_ranks = log, num_ranks
        self._metrics = output_dir / "metrics.jsonl"
        self._before = _inode(self._metrics)
        command = job(
            f"allstep.{framework}.train",
            *(*parity.DATA_FLAGS, *parity.SETTINGS["momentum"].flags),
            *("--epochs", NUM_EPOCHS, "--log-every", 1, "--output-dir", output_dir, *flags),
            num_ranks=None if num_ranks == 1 else num_ranks,
        )
        self.process = subprocess.Popen(
            command,
            env={**environment(), "HOROVOD_FUSION_THRESHOLD": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self.process.poll()

    def output(self) -> str:
        """What it wrote to the terminal."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_for_step(self, step: int, delay: float) -> None:
        """Wait until it has told of `step`, for step 0 until all ranks are there, and then `delay` seconds."""
        while self.status is None and not self._reached(step):
            time.sleep(POLL_SECONDS)
        time.sleep(delay)

    def kill(self, rank: int) -> bool:
        """End a rank by SIGKILL; False where the job has ended before."""
        pid = self._pids().get(rank)
        if pid is None or self.status is not None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            Violation: it does not end.
        """
        try:
            self.process.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"did not end in {JOB_SECONDS} s: {self.output()}") from None

    def _reached(self, step: int) -> bool:
        if step == 0:
            return len(self._pids()) == self._num_ranks
        # Until the job opens its own, the file is that of the run before.
        return _inode(self._metrics) not in (None, self._before) and last_step(self._metrics.parent) >= step

    def _pids(self) -> dict[int, int]:
        return {0: self.process.pid} if self._num_ranks == 1 else rank_processes(self.process.pid)


def last_step(output_dir: Path) -> int:
    """The last step that metrics.jsonl tells; its last line may be half written."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((event["step"] for event in map(json.loads, lines) if event["event"] == "step"), default=0)


def rank_processes(launcher: int) -> dict[int, int]:
    """Process ids of a job's ranks by rank, found among those that descend from its launcher's."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # The parent is the second field after the name, which is in parentheses and may hold anything (proc(5)).
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.name))
    ranks: dict[int, int] = {}
    generation = children.get(launcher, [])
    while generation:
        for pid in generation:
            rank = _rank(pid)
            if rank is not None:
                ranks.setdefault(rank, pid)  # what a rank starts has its environment
        generation = [child for pid in generation for child in children.get(pid, [])]
    return ranks


def _rank(pid: int) -> int | None:
    with suppress(OSError):
        match = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
        return int(match[1]) if match else None
    return None


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
