"""Check that a run that is killed or disturbed at any moment and then resumed ends like the undisturbed run.

    allstep soak [--kills 50] [--faults 40] [--seed 0] [--frameworks pytorch,tensorflow] [--ranks 1,2,3]
    allstep soak --elastic [--minutes 2] [--bed] [--seed 0] [--frameworks pytorch,tensorflow]
    allstep soak --elastic --strategies ddp,fsdp --frameworks pytorch [--minutes 2] [--seed 0]
    allstep soak --slices 4 --ranks 1,2,3,4 --faults 0

Trains on digits, kills a random rank by SIGKILL at a random moment (starting up, stepping, validating, writing a
checkpoint), resumes, kills again, and lets the run end after one to four kills. A run resumes on the same number of
ranks or, if it is a `mixed` one, on a random number each time. The same is then done with the faults of
`commands/soak/faults.py`, under all launchers. After each kill or fault:

    every checkpoint under its final name is complete, and has the weights of the undisturbed run at its step

and at the end:

    the weights are those of the undisturbed run: bit by bit in PyTorch if the number of ranks stayed the same,
    otherwise within a relative difference (see `allstep parity --help`) of 1e-6, or of 1e-5 if it changed
    metrics.jsonl has every step and every epoch once, with the losses of the undisturbed run

With --slices, each start draws the number of ranks and the launcher at random, and every bit must be the same.

Horovod fuses gradients that are ready at the same time into one all-reduce. With three or more ranks, the position of a
gradient in that buffer decides in which order the ranks' values are added, so equal runs differ in their last bits.
Here each gradient is sent separately (HOROVOD_FUSION_THRESHOLD=0), so that equal runs have equal bits. With --elastic,
elastic jobs are disturbed instead; `commands/soak/elastic_soak.py` lists what must hold for them. The exit status is 0
if all held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from allstep.commands.parity import command as parity
from allstep.commands.parity.curves import Curve
from allstep.commands.shared.jobs import scratch_folder
from allstep.commands.soak import elastic_soak, resume_check
from allstep.commands.soak.elastic_job import BED, BED_DIRECTORY, LOCAL
from allstep.commands.soak.faults import KINDS, InjectedFault, Violation, check_ended
from allstep.commands.soak.resume_check import NUM_STEPS, Case
from allstep.commands.soak.training import Training, last_step
from allstep.common.base.flag_types import MAX_COUNT, Parser, listed, local_ranks, number, one_of, whole
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.process.requirements import need_frameworks

OF_TORCHRUN = ("ddp", "fsdp")
HOROVOD_LAUNCHERS = ("horovodrun-mpi", "horovodrun-gloo", "mpirun")
MAX_A_RUN = 4
"""Maximum number of kills or faults of a run."""
START_UP_SHARE = 0.15
"""Share of the kills that happen before the first step."""
START_UP_SECONDS = 3.0
STEP_SECONDS = 0.05
"""Longest delay of a kill after the step at which it is due: the time of a few steps and their checkpoints."""


def main(argv: Sequence[str] | None = None) -> None:
    """Disturb and resume until kills and faults are used up; exit with status 1 on any violation."""
    flags = _flags(argv)
    need_frameworks(flags.frameworks, horovod="horovod" in flags.strategies, by="allstep soak")
    if flags.elastic:
        try:
            for framework, strategy in itertools.product(flags.frameworks, flags.strategies):
                chance = random.Random(flags.seed)
                elastic_soak.soak(framework, strategy, flags.minutes, chance, BED if flags.bed else LOCAL)
        except Violation as violation:
            print(f"VIOLATION: {violation}", flush=True)
            sys.exit(1)
        return
    chance = random.Random(flags.seed)
    with ProgressBar(flags.kills + flags.faults) as progress:
        soak = Soak(progress)
        cases = kill_cases(flags.frameworks, flags.ranks, chance)
        if flags.slices:
            cases = sliced_cases(flags.frameworks, flags.ranks, flags.slices)
        soak.run("kill", flags.kills, cases, draw_kill, chance)
        chance = random.Random(flags.seed)
        soak.run("fault", flags.faults, fault_cases(flags.frameworks, chance), draw_fault, chance)
    print(
        f"{soak.num_struck['kill']} kills, {soak.num_in_writing} of them while a checkpoint was written, and "
        f"{soak.num_struck['fault']} faults; {soak.num_violations} violations"
    )
    if soak.num_violations:
        sys.exit(1)


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("allstep soak", __doc__)
    add = parser.add_argument
    add("--kills", type=whole(0, MAX_COUNT), default=50, metavar="N")
    add("--faults", type=whole(0, MAX_COUNT), default=40, metavar="N")
    add("--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help="seed of all choices except exact moments")
    add("--frameworks", type=listed(one_of(*parity.FRAMEWORKS)), default=parity.FRAMEWORKS, metavar="NAME,...")
    add("--ranks", type=listed(local_ranks()), default=(1, 2, 3), metavar="N,...", help="ranks of the killed runs")
    add("--elastic", action="store_true", help="disturb an elastic job of each framework instead")
    add("--minutes", type=number(0, 24 * 60), default=2.0, metavar="N", help="--elastic: duration of a job")
    kind = listed(one_of("horovod", *OF_TORCHRUN))
    strategies = "--elastic: strategies of the jobs (horovod); ddp and fsdp run under torchrun"
    add("--strategies", type=kind, default=("horovod",), metavar="NAME,...", help=strategies)
    add("--bed", action="store_true", help="--elastic: use hosts of tests/cluster/two_hosts.sh, and cut links as well")
    add("--slices", type=whole(1, 2**12), metavar="V", help="--slices of the killed runs")
    flags = parser.parse_args(argv)
    if flags.slices and flags.slices < max(flags.ranks):
        parser.error(f"expected --slices to be at least {max(flags.ranks)}, the most ranks, received {flags.slices}")
    if flags.bed and not (flags.elastic and BED_DIRECTORY.is_dir()):
        parser.error("expected --bed with --elastic under tests/cluster/two_hosts.sh 2, received it elsewhere")
    if not set(OF_TORCHRUN).isdisjoint(flags.strategies) and (flags.bed or "tensorflow" in flags.frameworks):
        parser.error(
            f"expected --strategies {','.join(OF_TORCHRUN)} with --frameworks pytorch, without --bed, received "
            f"{','.join(flags.strategies)} with {','.join(flags.frameworks)}{' and --bed' if flags.bed else ''}"
        )
    return flags


def kill_cases(frameworks: Sequence[str], ranks: Sequence[int], chance: random.Random) -> Iterator[Case]:
    """Yield all cases in random order, alternating between the frameworks, without end."""
    choices = [(num,) for num in ranks] + ([tuple(ranks)] if len(ranks) > 1 else [])
    while True:
        shuffled = [[Case(framework, of) for of in chance.sample(choices, len(choices))] for framework in frameworks]
        yield from itertools.chain.from_iterable(zip(*shuffled, strict=True))


def sliced_cases(frameworks: Sequence[str], ranks: Sequence[int], slices: int) -> Iterator[Case]:
    """Yield cases that alternate between the frameworks, each with all numbers of ranks and all Horovod launchers."""
    for framework in itertools.cycle(frameworks):
        yield Case(framework, tuple(ranks), HOROVOD_LAUNCHERS, ("--slices", slices))


def fault_cases(frameworks: Sequence[str], chance: random.Random) -> Iterator[Case]:
    """Yield cases of two ranks: Horovod under its launchers or, for a quarter of PyTorch's runs, DDP under torchrun."""
    while True:
        for framework in frameworks:
            by_ddp = framework == "pytorch" and chance.random() < 0.25
            yield Case(framework, (2,), ("torchrun",) if by_ddp else HOROVOD_LAUNCHERS)


@dataclass(frozen=True)
class Start:
    """One start of a run, and the fault that will disturb it."""

    num_ranks: int
    launcher: str
    fault: InjectedFault
    starting_up: bool = False


Draw = Callable[[Case, int, int, random.Random], Start]
"""Function that draws the next start from the case, the last saved step and the number of disturbances left."""


def draw_kill(case: Case, saved_step: int, left: int, chance: random.Random) -> Start:
    """Draw a kill at any moment, so that the kills of a run are spread over all of it."""
    num_ranks = chance.choice(case.ranks)
    target = chance.randint(saved_step, saved_step + (NUM_STEPS - saved_step) // max(1, left))
    rank, starting_up = chance.randrange(num_ranks), chance.random() < START_UP_SHARE
    delay = chance.uniform(0, START_UP_SECONDS if starting_up else STEP_SECONDS)
    fault = InjectedFault("a killed rank", rank, 0 if starting_up else target, delay)
    return Start(num_ranks, chance.choice(case.launchers), fault, starting_up or target == 0)


def draw_fault(case: Case, saved_step: int, left: int, chance: random.Random) -> Start:
    """Draw a fault of any kind that happens after the first steps of this start."""
    num_ranks = chance.choice(case.ranks)
    step = 3 + chance.randint(saved_step, saved_step + max(0, NUM_STEPS - 6 - saved_step) // max(1, left))
    kind, rank, delay = chance.choice(list(KINDS)), chance.randrange(num_ranks), chance.uniform(0, STEP_SECONDS)
    fault = InjectedFault(kind, rank, step, delay)
    return Start(num_ranks, chance.choice(case.launchers), fault)


@dataclass(frozen=True)
class Struck:
    """A disturbance that happened."""

    start: Start
    seconds: float
    """Seconds from the fault to the end of the job."""
    last_step: int
    """Last step in metrics.jsonl."""
    saved_step: int
    """Step of the latest checkpoint; 0 without any."""
    in_writing: bool
    """Whether the job left a partially written checkpoint."""

    def __str__(self) -> str:
        start, moment = self.start, ", writing a checkpoint" if self.in_writing else ""
        whom = f" (rank {start.fault.rank} of {start.num_ranks})"
        return (
            f"{start.launcher}: {start.fault.kind}{whom} at step {self.last_step}{moment}; ended in "
            f"{self.seconds:.1f} s, saved is step {self.saved_step}"
        )


class Soak:
    """Disturbs runs, and counts disturbances and violations."""

    def __init__(self, progress: ProgressBar) -> None:
        self._progress = progress
        self.num_struck = {"kill": 0, "fault": 0}
        self.num_in_writing = self.num_violations = 0
        self._undisturbed: dict[tuple, Curve] = {}

    def run(self, what: str, budget: int, cases: Iterator[Case], draw: Draw, chance: random.Random) -> None:
        """Disturb runs `budget` times, one case after the other."""
        while self.num_struck[what] < budget:
            case = next(cases)
            self._progress.begin(f"{what} {self.num_struck[what] + 1} of {budget}: {case}", in_log=False)
            if case.reference not in self._undisturbed:
                self._undisturbed[case.reference] = resume_check.train_undisturbed(*case.reference)
            left = min(chance.randint(1, MAX_A_RUN), budget - self.num_struck[what])
            try:
                for struck in endure(case, self._undisturbed[case.reference], left, draw, chance):
                    self.num_struck[what] += 1
                    self.num_in_writing += struck.in_writing
                    self._progress.end(f"{what} {self.num_struck[what]}/{budget}: {case}: {struck}")
                self._progress.end(f"{case}: ended as if undisturbed", parts=0)
            except (Violation, TimeoutError) as violation:
                self.num_violations += 1
                self.num_struck[what] += 1
                self._progress.end(f"VIOLATION: {case}: {violation}")


def endure(case: Case, undisturbed: Curve, budget: int, draw: Draw, chance: random.Random) -> Iterator[Struck]:
    """Disturb one run `budget` times, check its files each time, then let it end and check its results.

    Raises Violation if a check failed.
    """
    with scratch_folder("soak") as output_dir:
        flags = ("--checkpoint-every", chance.choice([1, 2, 7]), *case.flags)
        saved_step = 0
        while True:
            start = draw(case, saved_step, budget, chance)
            resume = ("--resume", "latest") if saved_step else ()
            with resume_check.training(
                case.framework,
                start.num_ranks,
                output_dir,
                *(*flags, *resume),
                launcher=start.launcher,
                program=start.fault.program(case.framework, saved_step + 1) if budget else (),
            ) as run:
                struck = bool(budget) and start.fault.strike(run)
                seconds = check_end_of(run, start) if struck else resume_check.wait_for_good_end(run)
            if not struck:
                break
            if seconds is None:  # the fault came too late: the next start ends the run
                budget = 0
                continue
            budget -= 1
            in_writing = any((output_dir / "checkpoints").glob(".tmp-*"))
            saved_step = resume_check.check_checkpoints(case, output_dir, undisturbed)
            yield Struck(start, seconds, last_step(output_dir), saved_step, in_writing)
        resume_check.check_end(case, output_dir, undisturbed)


def check_end_of(run: Training, start: Start) -> float | None:
    """Check how a disturbed job ended; return what `check_ended` returns."""
    kind = KINDS[start.fault.kind]
    if start.starting_up or start.num_ranks == 1:  # only the launcher knows what happened, or no rank is left
        kind = replace(kind, can_report=False)
    return check_ended(run, kind)
