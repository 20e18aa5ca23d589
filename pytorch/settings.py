"""Settings that a user's hooks may change during a run: frozen weights, and options of the optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.state import ArrayShape
from allstep.common.recipe.schedule import rate_factors
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.pytorch.kept.extra_state import is_dense

NUMBERS = (bool, int, float, np.number, np.bool_)
_RATES = ("lr", "initial_lr")
_FLOAT = np.dtype(np.float64)


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each group that are numbers, pairs or tensors of them, without the learning rate."""
    return [
        {name: value for name, value in group.items() if name not in _RATES and _is_kept(value)} for group in groups
    ]


def _is_kept(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and is_dense(value) and not value.is_complex()
    return isinstance(value, NUMBERS) or (isinstance(value, tuple) and all(isinstance(one, NUMBERS) for one in value))


class Settings:
    """Settings in checkpoints: those that differ from the start, which the user's program sets."""

    def __init__(
        self,
        weights: Callable[[], Iterator[tuple[str, torch.nn.Parameter]]],
        optimizer: torch.optim.Optimizer,
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        """`weights` yields those that this rank holds; `options` is the result of `options_of` after a step."""
        self._weights, self._groups, self._options = weights, optimizer.param_groups, options
        self._start = {name: value for name, _, value in self._now()}

    def shapes(self) -> Iterator[tuple[str, ArrayShape]]:
        """Yield names and shapes of all tensors that `export` may yield."""
        return ((name, ArrayShape(np.shape(like), dtype=_FLOAT, optional=True)) for name, like, _ in self._now())

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of the settings that differ from the start."""
        for name, _, value in self._now():
            if value not in (None, self._start[name]):
                yield name, torch.tensor(value, dtype=torch.float64)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the settings in `arrays`, and reset all others to those at the start."""
        values = {**self._start, **{name: arrays[name].tolist() for name in self._start.keys() & arrays.keys()}}
        for name, weight in self._weights():
            weight.requires_grad_(bool(values[_of_weight(name)]))
        for name, like, group, option in self._of_groups():
            value = values[name]
            if value is None:
                group.pop(option, None)  # the optimizer adds it in its first step
            elif isinstance(like, torch.Tensor):
                group[option] = torch.tensor(value, dtype=like.dtype, device=like.device)
            elif isinstance(like, tuple) or float(value).is_integer():
                group[option] = type(like)(value)
            else:
                group[option] = value

    def _now(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each setting, a value of its type, and the present value, None if there is none yet."""
        for name, weight in self._weights():
            yield _of_weight(name), True, weight.requires_grad
        for name, like, group, option in self._of_groups():
            value = group.get(option)
            yield name, like, value.tolist() if isinstance(value, torch.Tensor) else value

    def _of_groups(self) -> Iterator[tuple[str, Any, dict[str, Any], str]]:
        for number, (likes, group) in enumerate(zip(self._options, self._groups, strict=True)):
            for option, like in likes.items():
                yield f"optimizer/param_groups.{number}/{option}", like, group, option


def _of_weight(name: str) -> str:
    return f"optimizer/{name}/requires_grad"


class SettingsCheck(Hook):
    """Hook after the user's own ones that refuses changes of the optimizer which a step would overwrite."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups, self._start = optimizer.param_groups, [float(group["lr"]) for group in optimizer.param_groups]
        self._set = self._start

    def on_start(self, session: TrainingRun) -> None:
        self._check(self._set)

    on_epoch = on_start  # a resumed run may only have to end the epoch

    def on_step(self, session: TrainingRun) -> None:
        self._set = [session.progress.learning_rate * factor for factor in rate_factors(self._start)]
        self._check(self._set)

    def _check(self, rates: Sequence[float]) -> None:
        if len(self._groups) != len(rates):
            raise UserError(
                f"expected as many groups of parameters as at the start, {len(rates)}, received {len(self._groups)} "
                "after a hook; give all at the start, and freeze their weights by requires_grad_(False)"
            )
        for rate, group in zip(rates, self._groups, strict=True):
            if group["lr"] != rate and not isinstance(group["lr"], torch.Tensor):
                raise UserError(
                    f"expected the learning rate {rate:g}, which the run sets, received {group['lr']:g} from a hook or "
                    "a scheduler; give warmup_epochs, lr_decay or lr_milestones"
                )
