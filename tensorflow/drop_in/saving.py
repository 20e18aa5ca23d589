"""Saved arguments of a `DistributedOptimizer`, and an optimizer whose arguments are lost.

Keras recreates optimizers from their configuration. This names the plain class, so that it works without Horovod; an
additional entry, which Keras ignores, has the arguments of `DistributedOptimizer`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import keras
from horovod.tensorflow import Adasum, Average, Sum
from horovod.tensorflow.compression import Compression

from allstep.common.launch.placement import find_placement
from allstep.tensorflow.compat import pickled_as
from allstep.tensorflow.drop_in.reduction import Gradient, GradientReduction

# Key of the entry next to "class_name" and "config".
KEY = "horovod"

_OPS = {"average": Average, "sum": Sum, "adasum": Adasum}
_COMPRESSIONS = {"none": Compression.none, "fp16": Compression.fp16}


if TYPE_CHECKING:
    # Base class that follows `Specialised` in the class of an optimizer.
    _Optimizer = keras.optimizers.Optimizer
else:
    _Optimizer = object


class Specialised(_Optimizer):
    """Base class of the mixins that `specialise` puts before an optimizer's class."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Keras pickles a method of the class, and pickle finds classes by name.
        return pickled_as(type(self).__bases__[1], super().__reduce__())


class Undistributed(Specialised):
    """Mixin of an optimizer that was distributed and could not be restored, which refuses to train on several ranks."""

    _entry: dict[str, Any]
    _reason: str

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply `grads` as Keras does.

        Raises RuntimeError if there are several ranks, or gradients that were summed before would be averaged.
        """
        if num_ranks() > 1 or self._entry.get("backward_passes_per_step", 1) != 1:
            raise RuntimeError(
                f"expected a DistributedOptimizer; received {type(self).__name__}, which was one before Keras "
                f"recreated it from its configuration: {self._reason}. Wrap it again before it trains: "
                "hvd.DistributedOptimizer(model.optimizer, ...)."
            )
        super().apply(grads, trainable_variables)


def num_ranks() -> int:
    """Return the number of ranks of the job, also before `hvd.init`."""
    return hvd.size() if hvd.is_initialized() else find_placement().world_size


def entry(reduction: GradientReduction) -> dict[str, Any]:
    """Return the arguments of `DistributedOptimizer` for JSON; "lost" names those that JSON cannot represent."""
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
    """Return the arguments of `DistributedOptimizer` in an entry, without those that are lost.

    Raises ValueError if the argument is not an entry.
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
    """Put `mixin` before the class of a plain optimizer, with the same name and module, which Keras saves."""
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
