"""What a saved optimizer says of its `DistributedOptimizer`, and the optimizer that has lost its own.

Keras makes optimizers anew from their configuration to load, copy, pickle and compile models. The configuration names
the plain class, so that it works where Horovod is not installed; beside it, where Keras does not look, stands what
`DistributedOptimizer` was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import keras
from horovod.tensorflow import Adasum, Average, Sum
from horovod.tensorflow.compression import Compression

from allstep.common.launch.placement import find_placement
from allstep.tensorflow.compat import pickled_as
from allstep.tensorflow.drop_in.reduction import Gradient, GradientReduction

# The entry beside "class_name" and "config".
KEY = "horovod"

_OPS = {"average": Average, "sum": Sum, "adasum": Adasum}
_COMPRESSIONS = {"none": Compression.none, "fp16": Compression.fp16}


if TYPE_CHECKING:
    # What comes after it among the bases of an optimizer's class.
    _Optimizer = keras.optimizers.Optimizer
else:
    _Optimizer = object


class Specialised(_Optimizer):
    """Base of what `specialise` puts before an optimizer's class."""

    def __reduce__(self) -> tuple:
        # Keras pickles a method of the class, and pickle finds classes by name.
        return pickled_as(type(self).__bases__[1], super().__reduce__())


class Undistributed(Specialised):
    """What an optimizer gains that was distributed and could not stay so: it does not train on several ranks."""

    _entry: dict[str, Any]
    _reason: str

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply `grads` as Keras does.

        Raises:
            RuntimeError: there are several ranks, or the gradients would be averaged where they were summed.
        """
        if num_ranks() > 1 or self._entry.get("backward_passes_per_step", 1) != 1:
            raise RuntimeError(
                f"expected a DistributedOptimizer; received {type(self).__name__}, which was one before Keras made it "
                f"anew from its configuration: {self._reason}. Wrap it again before it trains: "
                "hvd.DistributedOptimizer(model.optimizer, ...)."
            )
        super().apply(grads, trainable_variables)


def num_ranks() -> int:
    """Number of ranks of the job, also before `hvd.init`."""
    return hvd.size() if hvd.is_initialized() else find_placement().world_size


def entry(reduction: GradientReduction) -> dict[str, Any]:
    """The arguments of `DistributedOptimizer` for JSON; "lost" are the names of those that it cannot hold."""
    lost = {
        "groups": isinstance(reduction.groups, list),
        "process_set": reduction.process_set.process_set_id != 0,
        "compression": reduction.compression not in _COMPRESSIONS.values(),
        "local variables": bool(reduction.local_variables),
    }
    return {
        "name": reduction.name,
        "device_dense": reduction.device_dense,
        "device_sparse": reduction.device_sparse,
        "compression": _name(_COMPRESSIONS, reduction.compression),
        "sparse_as_dense": reduction.sparse_as_dense,
        "gradient_predivide_factor": reduction.predivide_factor,
        "op": _name(_OPS, reduction.op),
        "backward_passes_per_step": reduction.scale,
        "groups": None if lost["groups"] else reduction.groups,
        "scale_local_gradients": reduction.scale_local_gradients,
        "lost": [name for name, is_lost in lost.items() if is_lost],
    }


def arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DistributedOptimizer` in an entry, without those that are lost.

    Raises:
        ValueError: this is no entry.
    """
    try:
        known = {name: value for name, value in entry.items() if name != "lost" and name not in entry["lost"]}
        for name, values in (("op", _OPS), ("compression", _COMPRESSIONS)):
            if name in known:
                known[name] = values[known[name]]
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"expected what allstep writes of a DistributedOptimizer; received {entry!r}") from None
    return known


def specialise(optimizer: keras.optimizers.Optimizer, mixin: type, **attributes: Any) -> None:
    """Put `mixin` before the class of a plain optimizer, under the same name and place, which Keras writes down."""
    plain = type(optimizer)
    is_built_in = getattr(keras.optimizers, plain.__name__, None) is plain
    cls = type(
        plain.__name__,
        (mixin, plain),
        {
            **attributes,
            "__doc__": plain.__doc__,
            "__qualname__": plain.__qualname__,
            "__module__": "keras.optimizers" if is_built_in else plain.__module__,
        },
    )
    package, _, registered_name = keras.saving.get_registered_name(plain).rpartition(">")
    if package:
        keras.saving.register_keras_serializable(package, registered_name)(cls)
        keras.saving.get_custom_objects()[f"{package}>{registered_name}"] = plain
    optimizer.__class__ = cls


def make_plain(optimizer: keras.optimizers.Optimizer) -> None:
    """Undo `specialise`."""
    optimizer.__class__ = type(optimizer).__bases__[1]


def _name(names: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, known in names.items() if known == value), None)
