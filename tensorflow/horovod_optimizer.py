"""`DistributedOptimizer` for Keras 3: any Keras optimizer, with the gradients all-reduced before it uses them.

The ranks' gradients meet in `apply`, before Keras unscales, clips, decays, averages (EMA) or steps. All of that
then sees one gradient, that of the global batch, and does on N ranks what it does in a single process.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
from horovod.tensorflow import Adasum, Average, Sum
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set
from tensorflow.python.ops import control_flow_util

import tensorflow as tf
from allstep.tensorflow.horovod_collectives import native
from allstep.tensorflow.horovod_reduction import Gradient, GradientReduction

_num_compiled = itertools.count()
_compiled_models: weakref.WeakValueDictionary[int, keras.Model] = weakref.WeakValueDictionary()


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
    groups: int | list | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make `optimizer` all-reduce its gradients, and return it.

    The signature is that of `horovod.tensorflow.keras` 0.28.1. The object stays the one given, with its slots,
    schedule and exclusions; only its class changes, to a subclass of the same name, so a model saved with it loads
    where Horovod is not installed.

    name: of the collectives; give one where two optimizers of the same class and shapes run at the same time.
    compression: `Compression.fp16` halves what is sent.
    sparse_as_dense: all-reduce `IndexedSlices` as dense tensors instead of gathering their rows.
    gradient_predivide_factor: f splits the average into a division by f before the sum and by size/f after it.
    op: Average, Sum or Adasum (which needs MPI and a power of two of ranks).
    backward_passes_per_step: k accumulates k gradients on each rank and all-reduces their sum once. It is Keras'
        `gradient_accumulation_steps`: set either of the two.
    average_aggregated_gradients: divide that sum by k.
    groups: the number of groups in which gradients are fused, or lists of variables; a variable in no list is a
        group of its own. `num_groups` is its old name. By default all gradients are one group.
    process_set: the ranks that share gradients; others train on their own.
    scale_local_gradients: divide the gradients of local variables (`register_local_var`) by the number of ranks.

    Raises:
        ValueError: an argument is wrong, the optimizer is already distributed, or Horovod is not initialised.
        NotImplementedError: an option that Horovod has no operation for.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"`optimizer` must be a keras.optimizers.Optimizer. Received: {optimizer!r}")
    if isinstance(optimizer, _Distributed):
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
    hvd.size()  # raises where hvd.init() has not been called
    _set_accumulation(optimizer, backward_passes_per_step)
    _distribute(
        optimizer,
        GradientReduction(
            name=name or f"Distributed{type(optimizer).__name__}",
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            predivide_factor=gradient_predivide_factor,
            op=op,
            # Keras divides what it accumulates by the number of passes.
            scale=1 if average_aggregated_gradients else backward_passes_per_step,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        ),
    )
    return optimizer


class _Distributed:
    """What an optimizer gains: placed before its own class, it reduces the gradients on their way in."""

    _reduction: GradientReduction

    @property
    def variables(self) -> list:
        return _CallableList(super().variables)

    def register_local_var(self, var: Any) -> None:
        """Keep `var` out of the reduction: each rank trains its own.

        Raises:
            ValueError: with `global_clipnorm` or loss scaling, whose decisions for the shared variables depend on
                all gradients and would differ between the ranks.
        """
        if self.global_clipnorm or isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ValueError("Local variables cannot be combined with `global_clipnorm` or LossScaleOptimizer.")
        self._reduction.local_variables.add(native(var).ref())

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce `grads` over the ranks, then apply them as Keras does.

        Raises:
            NotImplementedError: under XLA, which has no kernels for Horovod's operations, or for float8 variables.
        """
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise NotImplementedError("Horovod's operations do not run under XLA: use jit_compile=False.")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if any(getattr(v, "overwrite_with_gradient", False) for v in variables):
            raise NotImplementedError("Variables that their gradient overwrites (float8) cannot be all-reduced.")
        if not self.gradient_accumulation_steps:
            super().apply(self._reduction(grads, variables), trainable_variables)
            return
        # Keras accumulates this rank's gradients and clips their mean when it steps: that is where they meet.
        with_gradient = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        step = vars(self)["_step"] = _AccumulatedStep(with_gradient)
        super().apply(grads, trainable_variables)
        if not step.is_reduced and not tf.executing_eagerly():
            raise RuntimeError(f"Keras {keras.__version__} did not call `_clip_gradients`: no gradient was reduced.")

    def _clip_gradients(self, grads: list[Gradient]) -> list[Gradient]:
        if self.gradient_accumulation_steps:
            step = vars(self)["_step"]
            step.is_reduced = True
            grads = self._reduction(grads, step.variables)
        return super()._clip_gradients(grads)


@dataclass
class _AccumulatedStep:
    """What `_clip_gradients` must know of the `apply` it runs in. Not a list, which Keras would track."""

    variables: list
    is_reduced: bool = False


class _CallableList(list):
    """Scripts written for older Keras call `optimizer.variables()`."""

    def __call__(self) -> _CallableList:
        return self


def compiled_models() -> list[keras.Model]:
    """The living models that were compiled with a distributed optimizer, oldest first."""
    gc.collect()  # a model is part of reference cycles: without this, ranks would see it die at different times
    return list(dict.fromkeys(model for _, model in sorted(_compiled_models.items())))


def track_model(model: keras.Model) -> None:
    """Add a model to `compiled_models`."""
    _compiled_models[next(_num_compiled)] = model


def _distribute(optimizer: keras.optimizers.Optimizer, reduction: GradientReduction) -> None:
    plain = type(optimizer)
    is_built_in = getattr(keras.optimizers, plain.__name__, None) is plain
    distributed = type(
        plain.__name__,
        (_Distributed, plain),
        {
            "_reduction": reduction,
            "__doc__": plain.__doc__,
            "__qualname__": plain.__qualname__,
            # Keras writes module and name into a saved model and finds the plain class by them.
            "__module__": "keras.optimizers" if is_built_in else plain.__module__,
        },
    )
    package, _, registered_name = keras.saving.get_registered_name(plain).rpartition(">")
    if package:
        keras.saving.register_keras_serializable(package, registered_name)(distributed)
        keras.saving.get_custom_objects()[f"{package}>{registered_name}"] = plain
    optimizer.__class__ = distributed


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


def _let_compile_know() -> None:
    """Teach `Model.compile` two things about distributed optimizers.

    `jit_compile="auto"` means no: on a GPU it means XLA, which cannot run Horovod. And it takes
    `experimental_run_tf_function`, which Horovod's examples pass and Keras 3 has dropped.
    """
    trainer = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    compile_ = trainer.compile
    signature = inspect.signature(compile_)

    @functools.wraps(compile_)
    def compile(self, optimizer="rmsprop", *args, **kwargs):
        if not isinstance(optimizer, _Distributed):
            return compile_(self, optimizer, *args, **kwargs)
        kwargs.pop("experimental_run_tf_function", None)
        call = signature.bind(self, optimizer, *args, **kwargs)
        if call.arguments.get("jit_compile", "auto") == "auto":
            call.arguments["jit_compile"] = False
        track_model(self)
        return compile_(*call.args, **call.kwargs)

    trainer.compile = compile


def _let_loss_scaling_know() -> None:
    """Make LossScaleOptimizer(DistributedOptimizer(x)) mean DistributedOptimizer(LossScaleOptimizer(x)).

    Keras writes the former itself under the mixed_float16 policy. It would look for non-finite values before the
    ranks' gradients meet, so one rank could skip a step in which the others wait for it.
    """
    loss_scale_optimizer = keras.optimizers.LossScaleOptimizer
    init = loss_scale_optimizer.__init__

    @functools.wraps(init)
    def __init__(self, inner_optimizer, *args, **kwargs):
        init(self, inner_optimizer, *args, **kwargs)
        if isinstance(inner_optimizer, _Distributed):
            reduction, plain = inner_optimizer._reduction, type(inner_optimizer).__bases__[1]
            inner_optimizer.__class__ = plain
            _distribute(self, reduction)

    loss_scale_optimizer.__init__ = __init__


def _let_legacy_names_work() -> None:
    """Give `keras.optimizers.legacy.Adam` and its kin Keras 3's meaning; as they come they only raise an error.

    Scripts use them because Horovod's wrapper could not do with the new optimizers of Keras 2.11.
    """
    for module in (keras.optimizers.legacy, tf.keras.optimizers.legacy):
        for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):
            setattr(module, name, getattr(keras.optimizers, name))


_let_compile_know()
_let_loss_scaling_know()
_let_legacy_names_work()
