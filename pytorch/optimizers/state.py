"""State of optimizers in checkpoints. `tensorflow/optimizers/state.py` has the same.

The suite's optimizers, and equal ones of torch, have canonical names for it, which both frameworks read. Any other
optimizer of a user keeps the names of its own `state`.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from allstep.common.base.errors import UserError, first_paragraph
from allstep.common.base.random_state import seeded
from allstep.common.checkpoint.state import ArrayShape
from allstep.common.config.train_config import LAYER_SLOTS
from allstep.common.data.passed_over import tell
from allstep.pytorch.kept.network_state import array_shape, can_be_kept, can_train
from allstep.pytorch.kept.snapshot import copied, is_same
from allstep.pytorch.settings import NUMBERS, options_of

Named = Sequence[tuple[str, torch.nn.Parameter]]
Shard = Callable[[np.ndarray, torch.Tensor], torch.Tensor]
"""Takes a whole array and a tensor; returns this rank's part of the array, sharded like the tensor."""
# PyTorch's names of optimizer slots, where they are not the canonical ones.
_SLOT_NAMES = {"momentum": "momentum_buffer", "sum_of_squares": "sum"}


class CanonicalSlots:
    """State of the suite's optimizers: an array for each weight and slot, and the number of steps of each weight."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        slots_of: Callable[[torch.nn.Parameter], Sequence[str]],
        device: torch.device,
    ) -> None:
        """`slots_of` returns the canonical names of a weight's slots."""
        self._optimizer, self._slots_of, self._device = optimizer, slots_of, device
        self._counts_steps = not isinstance(optimizer, torch.optim.SGD)  # nor do LARS and NovoGrad, which derive of it
        self.options = options_of(optimizer.param_groups)

    def shapes(self, named: Named) -> Iterator[tuple[str, ArrayShape]]:
        """Yield names and shapes of the tensors that `export` yields after the first step, for all weights."""
        for name, parameter in named:
            for slot in self._slots_of(parameter) if can_train(parameter) else ():
                yield f"optimizer/{name}/{slot}", ArrayShape(()) if slot in LAYER_SLOTS else array_shape(parameter)
            if self._counts_steps:
                yield f"optimizer/{name}/step", ArrayShape((), optional=True)

    def export(self, named: Named, num_steps: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of this rank's state after `num_steps` steps."""
        for name, parameter in named:
            if not can_train(parameter):
                continue
            state = self._optimizer.state.get(parameter, {})
            for slot in self._slots_of(parameter):
                # PyTorch creates slots in a weight's first step, which fp16 or a missing gradient may delay.
                zeros = torch.zeros(()) if slot in LAYER_SLOTS else torch.zeros_like(parameter.detach())
                found = state.get(_SLOT_NAMES.get(slot, slot))
                yield f"optimizer/{name}/{slot}", zeros if found is None else found
            # Only for weights that lacked gradients: the others have counted all steps of the run.
            count = float(state.get("step", 0))
            if self._counts_steps and count != num_steps:
                yield f"optimizer/{name}/step", torch.tensor(count)

    def load(self, named: Named, arrays: Mapping[str, np.ndarray], num_steps: int, shard: Shard) -> None:
        """Restore the state from `arrays`, which may lack some of it."""
        # Other optimizers of PyTorch read the step on the host, and would wait for the GPU in each step.
        group = self._optimizer.param_groups[0]
        step_device = self._device if group.get("fused") or group.get("capturable") else None
        for name, parameter in named:
            # A slot with one number is whole on every rank that has a part of its weight.
            scalar = torch.empty((), device=parameter.device)
            slots = {
                _SLOT_NAMES.get(slot, slot): shard(
                    arrays[f"optimizer/{name}/{slot}"], scalar if slot in LAYER_SLOTS else parameter.detach()
                )
                for slot in self._slots_of(parameter)
                if f"optimizer/{name}/{slot}" in arrays
            }
            count = float(arrays.get(f"optimizer/{name}/step", num_steps))
            self._optimizer.state.pop(parameter, None)
            if slots and self._counts_steps:
                slots["step"] = torch.tensor(count, device=step_device)
            if slots and count:
                self._optimizer.state[parameter] = slots


class OwnState:
    """State of any torch optimizer under its own names: tensors and numbers of each weight.

    Two trial steps, which are undone, show which these are. The methods are those of `CanonicalSlots`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the trial steps. Raises UserError, which names the state, if a checkpoint cannot hold it."""
        self._optimizer, self._kind = optimizer, type(optimizer).__name__
        if callable(getattr(optimizer, "eval", None)):
            raise self._refused("has other weights for validation, of its eval(), which a run does not call")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        attributes = {name: copied(one) for name, one in vars(optimizer).items() if name not in _OF_TORCH}
        options = [{name: copied(one) for name, one in group.items()} for group in optimizer.param_groups]
        before, outcomes = remembered(optimizer), []
        for _ in range(2):
            put_back(optimizer, before)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            try:
                with seeded(), torch.random.fork_rng():
                    torch.manual_seed(0)  # of GPUs as well
                    optimizer.step()
            except Exception as error:
                raise self._refused(f"cannot take a step: {first_paragraph(error)}") from error
            outcomes.append([_size(one.detach() - before[2][one]) for one in parameters])
        self._like = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
        self.options = options_of(optimizer.param_groups)
        for kept, old, new in zip(self.options, options, optimizer.param_groups, strict=True):
            for option in new.keys() - kept.keys() - _OF_GROUPS:
                if option not in old or not is_same(old[option], new[option]):
                    raise self._refused(f"changes {option} of its groups, {type(new[option]).__name__}")
        pairs = zip(before[1], optimizer.param_groups, strict=True)
        changes_rate = any(old["lr"] != new["lr"] for old, new in pairs)
        if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
            raise self._refused(f"remembers {others[0]} for no weight")
        changed = [name for name, one in attributes.items() if not is_same(one, vars(optimizer).get(name))]
        if outside := [*changed, *_kept_outside(optimizer, {id(one) for one in parameters})]:
            raise self._refused(f"remembers {outside[0]} outside of its state")
        for state in self._like.values():
            for slot, value in state.items():
                is_number = value is None or isinstance(value, NUMBERS)
                if not (can_be_kept(value.dtype) if isinstance(value, torch.Tensor) else is_number):
                    raise self._refused(f"remembers {slot} as {getattr(value, 'dtype', type(value).__name__)}")
        if changes_rate:
            raise self._refused("changes its learning rate, which is the run's (lr_decay, warmup_epochs)")
        put_back(optimizer, before)
        pairs = zip(*outcomes, strict=True)
        if not all(np.allclose(one, other, rtol=1e-4, atol=1e-4 * one[0], equal_nan=True) for one, other in pairs):
            raise self._refused("steps otherwise from the same state, so that it remembers more than that")

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"expected an optimizer whose state can be kept in checkpoints, received {self._kind}, which {why}; "
            "take another one"
        )

    def shapes(self, named: Named) -> Iterator[tuple[str, ArrayShape]]:
        for name, parameter in named:
            for slot, like in self._like.get(parameter, {}).items():
                if like is not None:
                    # A weight without a gradient so far has no state.
                    yield f"optimizer/{name}/{slot}", array_shape(_as_tensor(like), optional=True)

    def export(self, named: Named, num_steps: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named:
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                like, kept = self._like.get(parameter, {}).get(slot), _as_tensor(value)
                dtype = kept.dtype if like is None else _as_tensor(like).dtype
                if kept.shape != getattr(like, "shape", None if like is None else ()) or not torch.can_cast(
                    kept.dtype, dtype
                ):
                    tell(f"the optimizer {self._kind} changes what it remembers as {slot}: --resume will be refused")
                yield f"optimizer/{name}/{slot}", kept.to(dtype)

    def load(self, named: Named, arrays: Mapping[str, np.ndarray], num_steps: int, shard: Shard) -> None:
        self._optimizer.state.clear()
        for name, parameter in named:
            likes = self._like.get(parameter, {})
            state = {
                slot: _restored(arrays[f"optimizer/{name}/{slot}"], like, shard)
                for slot, like in likes.items()
                if f"optimizer/{name}/{slot}" in arrays
            }
            if state:
                self._optimizer.state[parameter] = {slot: state.get(slot) for slot in likes}


OptimizerState = CanonicalSlots | OwnState
"""The part of a checkpoint whose names begin with `optimizer/`."""
_OF_TORCH, _OF_GROUPS = {"state", "param_groups", "defaults"}, {"params", "lr", "initial_lr"}


def remembered(optimizer: torch.optim.Optimizer) -> tuple[dict, list[dict[str, Any]], dict]:
    """Return a copy of the slots of weights, of the options of groups and of the weights, for `put_back`."""
    groups = [_copied(group) for group in optimizer.param_groups]
    weights = {parameter: parameter.detach().clone() for group in groups for parameter in group["params"]}
    return {parameter: copy.deepcopy(own) for parameter, own in optimizer.state.items()}, groups, weights


@torch.no_grad()
def put_back(optimizer: torch.optim.Optimizer, before: tuple[dict, list[dict[str, Any]], dict]) -> None:
    """Put back what `remembered` returned, without gradients."""
    optimizer.state.clear()
    optimizer.state.update({parameter: copy.deepcopy(own) for parameter, own in before[0].items()})
    for group, options in zip(optimizer.param_groups, before[1], strict=True):
        group.clear()  # an option such as a count of steps may have been added
        group.update(_copied(options))
    for parameter, weight in before[2].items():
        parameter.copy_(weight)
        parameter.grad = None


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group of parameters, whose options may be tensors that a step changes in place."""
    return {name: one.detach().clone() if isinstance(one, torch.Tensor) else one for name, one in group.items()}


def _size(update: torch.Tensor) -> tuple[float, float]:
    """Return norm and sum of this rank's part of an update, instead of all its numbers."""
    own = getattr(update, "to_local", update.detach)()
    own = torch.view_as_real(own) if own.is_complex() else own
    return float(own.norm()), float(own.sum())


def _kept_outside(optimizer: torch.optim.Optimizer, parameters: Container[int]) -> Iterator[str]:
    """Yield the attributes of an optimizer that hold tensors, or another optimizer with a state of its own."""

    def holds(value: Any) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            return value.state is not optimizer.state
        if isinstance(value, (list, tuple, dict)):
            return any(map(holds, value.values() if isinstance(value, dict) else value))
        return isinstance(value, torch.Tensor) and id(value) not in parameters

    return (name for name, value in sorted(vars(optimizer).items()) if name not in _OF_TORCH and holds(value))


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor as it is, and a number as float64: it may be 1 in the trial step, and a fraction later."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _restored(array: np.ndarray, like: Any, shard: Shard) -> Any:
    if isinstance(like, torch.Tensor):
        return shard(array, like)
    return type(like)(array.item()) if float(array).is_integer() else array.item()
