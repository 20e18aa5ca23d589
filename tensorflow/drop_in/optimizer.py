"""`DistributedOptimizer` for Keras 3: any Keras optimizer, with the gradients all-reduced before it uses them.

Gradients are all-reduced in `apply`, before Keras unscales, clips, decays, averages (EMA) or steps. All of these see
the gradient of the global batch, and do the same on N ranks as in a single process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow import Adasum, Average, Sum
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from allstep.tensorflow.compat import MULTI_OPTIMIZER, accumulated_gradients, is_in_xla, trained_variables
from allstep.tensorflow.drop_in import xla
from allstep.tensorflow.drop_in.collectives import native
from allstep.tensorflow.drop_in.reduction import Gradient, GradientReduction
from allstep.tensorflow.drop_in.saving import Specialised, Undistributed, arguments, entry, make_plain, specialise


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make `optimizer` all-reduce its gradients, and return it.

    The signature is that of `horovod.tensorflow.keras` 0.28.1. The returned object is `optimizer`, with its slots,
    schedule and exclusions; only its class changes, to a subclass of the same name, so a model saved with it loads
    without Horovod.

    name: name of the collectives; give one if two optimizers of the same class and shapes run at the same time.
    compression: `Compression.fp16` halves what is sent.
    sparse_as_dense: all-reduce `IndexedSlices` as dense tensors instead of gathering their rows.
    gradient_predivide_factor: f splits the average into a division by f before the sum and by size/f after it.
    op: Average, Sum or Adasum (which needs MPI, and 2^n ranks).
    backward_passes_per_step: k accumulates k gradients on each rank and all-reduces their sum once. It is Keras'
        `gradient_accumulation_steps`: set either of the two.
    average_aggregated_gradients: divide that sum by k.
    groups: the number of groups in which gradients are fused, or lists of variables; a variable in no list is a
        separate group. `num_groups` is its old name. By default all gradients are one group.
    process_set: the ranks that share gradients; each other rank trains independently.
    scale_local_gradients: divide the gradients of local variables (`register_local_var`) by the number of ranks.

    Raises:
        ValueError: an argument is wrong, the optimizer is already distributed, or Horovod is not initialised.
        NotImplementedError: Horovod has no operation for an option.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"`optimizer` must be a keras.optimizers.Optimizer. Received: {optimizer!r}")
    if any(isinstance(part, Distributed) for part in parts(optimizer)):
        raise ValueError("`optimizer` is already a DistributedOptimizer; wrap it once.")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"`op` must be Average, Sum or Adasum. Received: op={op}")
    if gradient_predivide_factor != 1.0 and (op != Average or hvd.rocm_built()):
        raise ValueError("`gradient_predivide_factor` needs op=Average, and a build without ROCm.")
    if op == Adasum and (process_set.process_set_id != 0 or not hvd.mpi_enabled()):
        raise NotImplementedError("Adasum needs MPI (horovodrun --mpi) and the global process set.")
    if num_groups != 0:
        warnings.warn("`num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if groups is not None and not isinstance(groups, list) and not (isinstance(groups, int) and groups > 0):
        raise ValueError(f"`groups` must be a positive integer or a list of lists of variables. Received: {groups}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"`backward_passes_per_step` must be an integer >= 1. Received: {backward_passes_per_step}")
    hvd.size()  # raises if hvd.init() has not been called
    _set_accumulation(optimizer, backward_passes_per_step)
    if isinstance(optimizer, Undistributed):
        make_plain(optimizer)
    specialise(
        optimizer,
        Distributed,
        _reduction=GradientReduction(
            name=name or f"Distributed{type(optimizer).__name__}",
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            predivide_factor=gradient_predivide_factor,
            op=op,
            # Keras divides accumulated gradients by the number of passes.
            scale=1 if average_aggregated_gradients else backward_passes_per_step,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        ),
    )
    return optimizer


class Distributed(Specialised):
    """Mixin that `specialise` puts before an optimizer's class, to all-reduce gradients before it applies them."""

    _reduction: GradientReduction

    @property
    def variables(self) -> list[Any]:
        return _CallableList(super().variables)

    @property
    def lr(self) -> Any:
        """The learning rate by its older name, as a `tf.Variable` for `keras.backend.set_value`."""
        return native(self.learning_rate)

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **options: Any) -> keras.optimizers.Optimizer:
        """Create an optimizer that reduces like this one, or refuses to train if this one has local variables."""
        optimizer = super().from_config(config, *args, **options)
        if cls._reduction.local_variables:
            make_plain(optimizer)
            _hold_back(optimizer, entry(cls._reduction), "which variables are local is unknown")
        return optimizer

    def register_local_var(self, var: Any) -> None:
        """Exclude `var` from the reduction, so that each rank trains it separately.

        Raises ValueError if the optimizer has `global_clipnorm` or loss scaling, whose decisions for the shared
        variables depend on all gradients and would differ between ranks.
        """
        if self.global_clipnorm or isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ValueError("Local variables cannot be combined with `global_clipnorm` or LossScaleOptimizer.")
        self._reduction.local_variables.add(native(var).ref())

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce `grads` over the ranks, then apply them as Keras does.

        Raises NotImplementedError if it is called in code that XLA compiles, which has no kernels for Horovod's
        operations, or for float8 variables.
        """
        variables = list(trained_variables(self) if trainable_variables is None else trainable_variables)
        if xla.hand_out(self, grads, variables):
            return
        if is_in_xla():
            raise NotImplementedError(xla.OUTSIDE)
        if any(getattr(v, "overwrite_with_gradient", False) for v in variables):
            raise NotImplementedError("Variables that their gradient overwrites (float8) cannot be all-reduced.")
        if not self.gradient_accumulation_steps:
            apply = super().apply
            xla.updated(lambda reduced: apply(reduced, trainable_variables), self._reduction(grads, variables))
            return
        # Keras accumulates this rank's gradients and clips their mean when it steps. They are all-reduced there, within
        # a condition, of which XLA cannot compile a part.
        with_gradient = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        step = self.__dict__["_step"] = _AccumulatedStep(with_gradient)
        super().apply(grads, trainable_variables)
        if not step.is_reduced and not tf.executing_eagerly():
            raise RuntimeError(f"Keras {keras.__version__} did not call `_clip_gradients`: no gradient was reduced.")

    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Return `grads` reduced over all ranks: the first half of `apply`, for callers that need reduced gradients."""
        return self._reduction(grads, variables)

    def apply_reduced(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply the result of `reduce`: the second half of `apply`."""
        super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Gradient]) -> list[Gradient]:
        if self.gradient_accumulation_steps:
            step = vars(self)["_step"]
            step.is_reduced = True
            grads = self._reduction(grads, step.variables)
        return super()._clip_gradients(grads)


@dataclass
class _AccumulatedStep:
    """State of `apply` for the `_clip_gradients` that it calls. It is not a list, because Keras would track one."""

    variables: list
    is_reduced: bool = False


class _CallableList(list):
    """List of variables that can be called, because scripts for older Keras call `optimizer.variables()`."""

    def __call__(self) -> _CallableList:
        return self


def parts(optimizer: keras.optimizers.Optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """Yield the optimizer and those inside it (in a LossScaleOptimizer or a MultiOptimizer)."""
    yield optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield from parts(optimizer.inner_optimizer)
    elif isinstance(optimizer, MULTI_OPTIMIZER):
        for inner in optimizer.optimizers:
            yield from parts(inner)


def is_distributed(optimizer: Any) -> bool:
    """Return whether the optimizer reduces all gradients that it applies."""
    if isinstance(optimizer, MULTI_OPTIMIZER) and not isinstance(optimizer, Distributed):
        return bool(optimizer.optimizers) and all(map(is_distributed, optimizer.optimizers))
    return isinstance(optimizer, Distributed)


def lasting_state(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the optimizer's variables except accumulated gradients, which differ between ranks."""
    in_the_making = {id(v) for part in parts(optimizer) for v in accumulated_gradients(part)}
    return [v for v in optimizer.variables if id(v) not in in_the_making]


def saved_entry(optimizer: keras.optimizers.Optimizer) -> dict[str, Any] | None:
    """Return the entry to save about how the optimizer is distributed, or None for a plain optimizer."""
    if isinstance(optimizer, Distributed):
        return entry(optimizer._reduction)
    return optimizer._entry if isinstance(optimizer, Undistributed) else None


def distribute_again(optimizer: keras.optimizers.Optimizer, saved: Any, **options: Any) -> None:
    """Distribute a plain optimizer with the arguments in `saved`, updated by `options`.

    Raises as `DistributedOptimizer` does, ValueError or TypeError also if `saved` is incomplete or malformed.
    """
    known = arguments(saved)
    if lost := [name for name in saved["lost"] if name not in options]:
        raise ValueError(f"a configuration does not hold its {', '.join(lost)}")
    DistributedOptimizer(optimizer, **{**known, **options})


def restore(optimizer: keras.optimizers.Optimizer, saved: Any) -> None:
    """Call `distribute_again`; if it fails, make the optimizer refuse to train on several ranks, with the reason."""
    try:
        distribute_again(optimizer, saved)
    except (NotImplementedError, TypeError, ValueError) as error:
        _hold_back(optimizer, saved if isinstance(saved, dict) else {}, str(error))


def _hold_back(optimizer: keras.optimizers.Optimizer, saved: dict[str, Any], reason: str) -> None:
    specialise(optimizer, Undistributed, _entry=saved, _reason=reason)


def _set_accumulation(optimizer: keras.optimizers.Optimizer, num_passes: int) -> None:
    if num_passes == 1:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    steps = optimizer.gradient_accumulation_steps
    if steps and steps != num_passes:
        raise ValueError(
            f"backward_passes_per_step={num_passes} is Keras' gradient_accumulation_steps, which is {steps} in the "
            "optimizer already. Set one of them."
        )
    if not steps and optimizer.built:
        raise ValueError("backward_passes_per_step must be set before the optimizer is built.")
    optimizer.gradient_accumulation_steps = num_passes
