"""The parity gate: only runs that train the same curve are compared in speed.

Every run (framework, strategy, ranks, model) trains a few steps on digits with the same global batch from the same
weights. Its losses and weights are compared with those of a reference by the measures and bounds of `allstep parity`.
If only the weights are too far apart, a ReLU may have had an input within a rounding error of 0, by chance; which seeds
have such a kink depends on the processor. So other seeds are tried: a run that differs for a real reason differs with
all of them.

ResNets are judged otherwise. Batch norm normalises each rank's samples, so they have one curve per world size. Also, in
a network that deep some ReLU's input is always within a rounding error of 0: for ResNet-18, PyTorch's gradients in
float32 differ from those in float64 by up to a tenth. So the weights tell nothing, and the losses tell something for
two steps: the second loss shows the first update, which halves the loss here, and agrees to 2e-4 between frameworks.
Networks from outside the suite may be as deep, and are judged in the same way.

With --slices nothing is left to rounding: for any world size and any strategy that has the flag, with or without batch
norm, a framework's losses and weights must have the same bits.

In bf16 the frameworks round differently, by 1/256 in each layer, and biases, which begin at 0, differ by a sixth after
ten steps. So only losses are judged. Between frameworks they differed by 0.7 % on a processor that computes in bf16 and
by up to 2.2 % on one that does not (where each differs from float32 by up to 1.6 %): 4 % is allowed. Within a framework
they differed by 0.3 %: 2 % is allowed. The same bounds hold for fp16 and tf32, which round more finely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.compare.cells import INDEPENDENT, Cell, Settings, slices_of, strategy_entry, trainers_name
from allstep.commands.compare.records import Verdict
from allstep.commands.parity import command as parity
from allstep.commands.parity import curves
from allstep.commands.shared.jobs import Outcome, scratch_folder, train_command
from allstep.common.catalog.networks import entry_of

_NUM_SAMPLES, _SIDE = 1437, 8  # of the digits data set
_OPTIMIZER = "momentum"
_SEEDS = (parity.SEED, 3, 4)
_DEEP_STEPS = 2
_DEEP_BOUNDS = parity.Bounds(runs=1e-3, frameworks=1e-3)
_ROUNDED_BOUNDS = parity.Bounds(runs=2e-2, frameworks=4e-2)


@dataclass(frozen=True)
class GateRun:
    """Configuration in which a curve is trained."""

    framework: str
    strategy: str
    ranks: int
    model: str
    precision: str
    compiled: bool = False
    slices: int | None = None

    @property
    def id(self) -> str:
        name = f"{self.framework}.{self.strategy}.{self.ranks}.{self.model}.{self.precision}"
        name += ".compiled" if self.compiled else ""
        return f"{name}.slices-{self.slices}" if self.slices else name

    @property
    def deep(self) -> bool:
        """Whether rounding errors grow fast in its network."""
        return entry_of(self.model).deep

    @property
    def group(self) -> tuple[object, ...]:
        """Key of the runs that must have the same curve."""
        curve = (self.model, self.precision)
        return (*curve, self.slices or -self.ranks) if self.deep else curve

    def has_bits_of(self, other: GateRun) -> bool:
        """Return whether both runs must have not only the same curve, but the same bits."""
        return self.slices is not None and self == replace(other, strategy=self.strategy, ranks=self.ranks)


def reference_of(run: GateRun, runs: Sequence[GateRun]) -> GateRun:
    """Return the reference of a run: the first run whose bits it must have, else the first of its group."""
    return next(
        (one for one in runs[: runs.index(run)] if run.has_bits_of(one)),
        next(one for one in runs if one.group == run.group),
    )


def gate_run(cell: Cell, settings: Settings) -> GateRun | None:
    """Return the run that trains a cell's curve; None if the cell has no curve to compare."""
    if (cell.strategy == INDEPENDENT and cell.ranks > 1) or not strategy_entry(cell).synchronous:
        return None
    slices = slices_of(cell, settings)
    return GateRun(cell.framework, cell.strategy, cell.ranks, cell.model, cell.precision, cell.compiled, slices)


def why_none(cell: Cell) -> str:
    """Return why a cell has no curve to compare."""
    if cell.strategy == INDEPENDENT:
        return "independent processes train a network each"
    return "asynchronous: the order of updates, and so the curve, is left to chance"


class Gate:
    """Trains runs and compares their curves with the first one of each group."""

    def __init__(
        self, num_steps: int, launch: Callable[[Sequence[list[str]]], Sequence[Outcome]], *, device: str = "cpu"
    ) -> None:
        """Take `launch`, which runs each command as a separate job, and the trainers' `device`."""
        self._num_steps, self._launch, self._device = num_steps, launch, device
        self._trained: dict[tuple[GateRun, int], tuple[Outcome, curves.Curve | None]] = {}
        """Outcome and curve of each run and seed."""

    def judge(self, run: GateRun, reference: GateRun) -> Verdict:
        """Return the verdict on `run`; see `reference_of`."""
        for seed in _SEEDS:
            verdict = self._judge(run, reference, seed)
            if not _may_be_a_kink(verdict):
                break
        return verdict

    def _judge(self, run: GateRun, reference: GateRun, seed: int) -> Verdict:
        outcome, expected = self._curve(reference, seed)
        if expected is None:
            return self._failed(run, f"{reference.id}, the reference: {outcome.reason}", outcome.log)
        if run == reference:
            return Verdict("passed", None, self._num_steps_of(run), reference.id, 0.0, 0.0, 0.0)
        outcome, curve = self._curve(run, seed)
        if curve is None:
            return self._failed(run, outcome.reason, outcome.log)
        [worst] = curves.apart(expected, curve).values()
        column = "runs" if run.framework == reference.framework else "frameworks"
        loss_bounds = _loss_bounds(run)
        bound = parity.bound_of(loss_bounds or parity.SETTINGS[_OPTIMIZER].bounds, column)
        passes = worst.loss <= bound and (loss_bounds is not None or worst.weights <= bound)
        if run.has_bits_of(reference):
            bound, passes = 0.0, worst.loss == worst.weights == 0
        reason = (
            f"its curve differs from that of {reference.id}: losses by {worst.loss:.1e}, weights by "
            f"{worst.weights:.1e}, where {bound:.0e} is allowed"
        )
        return Verdict(
            status="passed" if passes else "failed",
            reason=None if passes else reason,
            num_steps=self._num_steps_of(run),
            reference=reference.id,
            loss_difference=_finite(worst.loss),
            weight_difference=_finite(worst.weights),
            bound=bound,
        )

    def _num_steps_of(self, run: GateRun) -> int:
        return min(self._num_steps, _DEEP_STEPS) if run.deep else self._num_steps

    def _curve(self, run: GateRun, seed: int) -> tuple[Outcome, curves.Curve | None]:
        if (run, seed) not in self._trained:
            self.train([run], seed)
        return self._trained[run, seed]

    def train(self, runs: Sequence[GateRun], seed: int = _SEEDS[0]) -> None:
        """Train runs that will be judged; together that takes less time than one by one."""
        with scratch_folder("compare") as folder:
            folders = [folder / str(number) for number in range(len(runs))]
            commands = [self._command(*pair, seed) for pair in zip(runs, folders, strict=True)]
            for run, own, outcome in zip(runs, folders, self._launch(commands), strict=True):
                curve = curves.read_curve(own, self._num_steps_of(run)) if outcome.status == "ok" else None
                self._trained[run, seed] = outcome, curve

    def _command(self, run: GateRun, folder: Path, seed: int) -> list[str]:
        flags = (
            *(*_data_flags(run.model), "--model", run.model, "--precision", run.precision),
            *("--epochs", 1, "--log-every", 1, "--seed", seed, "--device", self._device),
            # One epoch has the requested number of steps, the last one with fewer samples.
            *("--global-batch-size", math.ceil(_NUM_SAMPLES / self._num_steps_of(run)), "--output-dir", folder),
            *parity.SETTINGS[_OPTIMIZER].flags,
            *(["--compile"] if run.compiled else []),
            *(["--slices", run.slices] if run.slices else []),
            # XLA has no deterministic gradient of max-pooling, and raises an error even on CPUs.
            *([] if run.compiled and run.framework == "tensorflow" else ["--deterministic"]),
        )
        return train_command(run.framework, trainers_name(run.strategy), run.ranks, flags)

    def _failed(self, run: GateRun, reason: str | None, log: str | None) -> Verdict:
        return Verdict("failed", reason, self._num_steps_of(run), log=log)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _data_flags(model: str) -> tuple[object, ...]:
    """Return flags for digits (8 x 8 pixels), or for as many synthetic images of a size that the network accepts."""
    entry = entry_of(model)
    size = max(entry.smallest_image, entry.patch_size)
    if size <= _SIDE:
        return "--dataset", "digits"
    return "--dataset", "synthetic", "--synthetic-samples", _NUM_SAMPLES, "--synthetic-shape", size, size, 3


def _may_be_a_kink(verdict: Verdict) -> bool:
    """Return whether only the weights of a run differ, not its losses."""
    loss, bound = verdict.loss_difference, verdict.bound
    return verdict.status == "failed" and loss is not None and bound is not None and loss <= bound


def _loss_bounds(run: GateRun) -> parity.Bounds | None:
    """Return the bounds of runs judged only by losses; None for runs judged by weights as well."""
    if run.precision != "float32":
        return _ROUNDED_BOUNDS
    return _DEEP_BOUNDS if run.deep else None
