"""Check that a disturbed and resumed run equals the undisturbed run in checkpoints, losses, steps and weights."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.parity import command as parity
from allstep.commands.parity import curves
from allstep.commands.parity.curves import Curve, weights_apart
from allstep.commands.shared.jobs import scratch_folder, start
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.commands.soak import training as trainings
from allstep.commands.soak.faults import STALL_SECONDS, Violation
from allstep.commands.soak.training import Training
from allstep.common.base.errors import UserError
from allstep.common.checkpoint import load

NUM_EPOCHS = 2
NUM_STEPS = NUM_EPOCHS * parity.STEPS_PER_EPOCH
FINAL_BOUND = 1e-6
# Relative differences are larger while weights are small, and other numbers of ranks add in another order: undisturbed
# runs on 1 and 3 ranks end 1e-6 to 3e-6 apart, runs that start half a unit in the last place apart up to 7e-6.
BOUND_ON_THE_WAY = parity.Bounds.runs
JOB_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """Configuration of a run that will be disturbed."""

    framework: str
    ranks: tuple[int, ...]
    """Numbers of ranks to choose from at each start; a single one if it stays the same."""
    launchers: tuple[str, ...] = ("horovodrun-mpi",)
    """Launchers to choose from at each start."""
    flags: tuple[str | int, ...] = ()
    """Further flags of the trainer, such as --slices."""

    @property
    def reference(self) -> tuple[str, int, str, tuple[str | int, ...]]:
        """Framework, number of ranks, launcher and flags of the undisturbed run to compare with."""
        return self.framework, self.ranks[0], self.launchers[0], self.flags

    @property
    def exact(self) -> bool:
        """Whether every bit must equal that of the undisturbed run."""
        if "--slices" in self.flags:
            return True
        # The order in which the values of three or more ranks are added depends on the launcher's library.
        same_sums = len(self.launchers) == 1 or self.ranks[0] <= 2
        return self.framework == "pytorch" and len(self.ranks) == 1 and same_sums

    def __str__(self) -> str:
        return f"{self.framework}, {self.ranks[0] if len(self.ranks) == 1 else 'mixed'} ranks"


def wait_for_good_end(run: Training) -> float:
    """Wait for an undisturbed job, which must succeed."""
    try:
        run.wait(JOB_SECONDS)
    except TimeoutError:
        raise Violation(f"did not end in {JOB_SECONDS} s: {run.printed()}") from None
    if run.status:
        raise Violation(f"ended with status {run.status}: {run.printed()}")
    return 0.0


def check_checkpoints(case: Case, output_dir: Path, undisturbed: Curve) -> int:
    """Check that all checkpoints are complete and correct; return the step of the latest, 0 without any."""
    latest = 0
    try:
        for path in sorted((output_dir / "checkpoints").glob("step-*")):
            state = load(path, output_dir, warn=_refuse)
            latest = state.progress.step
            _check_weights(case, curves.weights_of(state), undisturbed, latest, BOUND_ON_THE_WAY)
        if latest and load("latest", output_dir / "checkpoints", warn=_refuse).progress.step != latest:
            raise Violation("latest is not the checkpoint of the highest step")
    except UserError as error:
        raise Violation(str(error)) from None
    return latest


def check_end(case: Case, output_dir: Path, undisturbed: Curve) -> None:
    """Check the checkpoints, weights, steps and losses of a run that has ended."""
    if check_checkpoints(case, output_dir, undisturbed) != NUM_STEPS:
        raise Violation("the last step has no checkpoint")
    state = load("latest", output_dir / "checkpoints", warn=_refuse)
    bound = BOUND_ON_THE_WAY if len(case.ranks) > 1 else FINAL_BOUND
    _check_weights(case, curves.weights_of(state), undisturbed, NUM_STEPS, bound)
    events = read_events(output_dir / FILE)
    steps, epochs = [event.step for event in events.steps], [event.epoch for event in events.epochs]
    for name, found, number in (("step", steps, NUM_STEPS), ("epoch", epochs, NUM_EPOCHS)):
        if found != list(range(1, number + 1)):
            raise Violation(f"{FILE} has the {name}s {found}")
    if len(events.ends) != 1:
        raise Violation(f"{FILE} has {len(events.ends)} end events")
    bound = 0.0 if case.exact else BOUND_ON_THE_WAY
    for event in events.steps:
        expected = undisturbed.losses[event.step]
        if not math.isclose(event.loss, expected, rel_tol=bound):
            raise Violation(f"expected a loss of {expected} at step {event.step}, received {event.loss}")


def _check_weights(case: Case, weights: dict, undisturbed: Curve, step: int, bound: float) -> None:
    apart = weights_apart(undisturbed.weights[step], weights)
    if not apart <= (0.0 if case.exact else bound):
        raise Violation(f"the weights of step {step} differ from the undisturbed run's by {apart:.1e}")


def _refuse(warning: str) -> None:
    raise Violation(f"unexpected warning: {warning}")


def train_undisturbed(framework: str, num_ranks: int, launcher: str, given_flags: Sequence[str | int] = ()) -> Curve:
    """Train the run to compare with and return its curve and each step's weights. Raises Violation if it failed."""
    print(f"{framework}, {num_ranks} ranks, {launcher}: undisturbed", flush=True)
    with scratch_folder("soak") as output_dir:
        flags = ("--checkpoint-every", 1, "--keep-checkpoints", NUM_STEPS, *given_flags)
        with training(framework, num_ranks, output_dir, *flags, launcher=launcher) as run:
            wait_for_good_end(run)
        return curves.read_curve(output_dir, NUM_STEPS)


def training(
    framework: str,
    num_ranks: int,
    output_dir: Path,
    *flags: str | int,
    launcher: str = "horovodrun-mpi",
    program: Sequence[str] = (),
    strategy: str | None = None,
) -> AbstractContextManager[Training]:
    """Start a trainer, without a launcher if it has one rank; its processes are killed when the block ends.

    `program` are arguments of Python that replace the trainer's module; `strategy` is by default Horovod, or DDP under
    torchrun.
    """
    strategy = strategy or ("ddp" if launcher == "torchrun" else "horovod")
    return trainings.training(
        [
            *start(launcher if num_ranks > 1 else None, num_ranks),
            *(program or ("-m", f"allstep.{framework}.train")),
            *("--strategy", strategy, *parity.DATA_FLAGS, *parity.SETTINGS["momentum"].flags),
            *("--seed", parity.SEED, "--epochs", NUM_EPOCHS, "--log-every", 1, "--output-dir", output_dir),
            *("--stall-timeout", STALL_SECONDS, *flags),
        ],
        output_dir,
        num_ranks,
    )
