"""The parity gate: speeds are compared only of places that train the same curve.

Every place (framework, strategy, ranks, model) trains a few steps on digits with the same global batch from the same
weights, and its losses and weights are held against those of a reference by the measures and bounds of `allstep
parity`. A batch norm normalises each rank's samples, so that networks with one have a curve for each number of ranks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks import parity
from allstep.benchmarks.comparison.cells import INDEPENDENT, Cell, start_of, trainers_name
from allstep.benchmarks.comparison.jobs import Outcome
from allstep.benchmarks.launching import train_command

_NUM_SAMPLES = 1437  # of digits
_OPTIMIZER = "momentum"


@dataclass(frozen=True)
class Place:
    """Where a curve is trained."""

    framework: str
    strategy: str
    ranks: int
    model: str

    @property
    def id(self) -> str:
        return f"{self.framework}.{self.strategy}.{self.ranks}.{self.model}"

    @property
    def group(self) -> tuple[object, ...]:
        """Places of one group have to have one curve."""
        return (self.model, self.ranks) if self.model.startswith("resnet") else (self.model,)


def place_of(cell: Cell) -> Place | None:
    """Where a cell's curve is trained; None where it has none that could be compared."""
    if (cell.strategy == INDEPENDENT and cell.ranks > 1) or not start_of(cell).synchronous:
        return None
    return Place(cell.framework, cell.strategy, cell.ranks, cell.model)


def why_none(cell: Cell) -> str:
    """Why a cell has no curve that could be compared."""
    if cell.strategy == INDEPENDENT:
        return "independent processes train a network each"
    return "asynchronous: the order of updates, and so the curve, is left to chance"


class Gate:
    """Trains places and compares their curves with the first one of each group."""

    def __init__(self, num_steps: int, launch: Callable[[list[list[str]]], Outcome]) -> None:
        """`launch` runs commands."""
        self._num_steps, self._launch = num_steps, launch
        self._references: dict[tuple[object, ...], tuple[Place, parity.Curve]] = {}

    def judge(self, place: Place, reference: Place) -> dict:
        """The verdict on `place`, as the file format has it; `reference` is the first place of its group."""
        if place.group not in self._references:
            outcome, curve = self._train(reference)
            if curve is None:
                return self._verdict("failed", f"the reference, {reference.id}: {outcome.reason}", outcome=outcome)
            self._references[place.group] = reference, curve
        reference, expected = self._references[place.group]
        if place == reference:
            return self._verdict("passed", None, reference, loss_difference=0.0, weight_difference=0.0, bound=0.0)
        outcome, curve = self._train(place)
        if curve is None:
            return self._verdict("failed", outcome.reason, outcome=outcome)
        differences = parity.apart(expected, curve)
        column = "runs" if place.framework == reference.framework else "frameworks"
        bounds = parity.SETTINGS[_OPTIMIZER].bounds
        [worst] = parity.largest([differences]).values()
        bound = parity.bound_of(bounds, column)
        figures = {"loss_difference": worst.loss, "weight_difference": worst.weights, "bound": bound}
        if parity.passes(differences, bounds, column):
            return self._verdict("passed", None, reference, **figures)
        reason = (
            f"its curve differs from that of {reference.id}: losses by {worst.loss:.1e}, weights by "
            f"{worst.weights:.1e}, where {bound:.0e} is allowed"
        )
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        return self._verdict("failed", reason, reference, **finite)

    def _train(self, place: Place) -> tuple[Outcome, parity.Curve | None]:
        with tempfile.TemporaryDirectory(prefix="allstep-gate-") as folder:
            flags = (
                *("--dataset", "digits", "--model", place.model, "--epochs", 1, "--log-every", 1),
                # One epoch has the steps asked for, the last of them with fewer samples.
                *("--global-batch-size", math.ceil(_NUM_SAMPLES / self._num_steps), "--output-dir", folder),
                *parity.SETTINGS[_OPTIMIZER].flags,
            )
            outcome = self._launch([train_command(place.framework, trainers_name(place.strategy), place.ranks, flags)])
            if outcome.status != "ok":
                return outcome, None
            return outcome, parity.read_curve(Path(folder), self._num_steps)

    def _verdict(
        self,
        status: str,
        reason: str | None,
        reference: Place | None = None,
        *,
        outcome: Outcome | None = None,
        **figures,
    ) -> dict:
        return {
            "status": status,
            "reason": reason,
            "reference": reference.id if reference else None,
            "loss_difference": None,
            "weight_difference": None,
            "bound": None,
            **figures,
            "num_steps": self._num_steps,
            "log": outcome.log if outcome else None,
        }


def no_verdict(reason: str) -> dict:
    """The verdict on a cell without a curve, or whose curve nobody has looked at."""
    figures = dict.fromkeys(("reference", "loss_difference", "weight_difference", "bound", "num_steps"))
    return {"status": "none", "reason": reason, **figures}
