"""Comparison over the ranks of what each is about to do in `fit`, before the first step.

Every step and every comparison of replicas is a collective, so ranks that do not run `fit` alike would wait for each
other for ever.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from allstep.tensorflow.drop_in.callbacks import BroadcastGlobalVariablesCallback
from allstep.tensorflow.drop_in.collectives import native, per_rank
from allstep.tensorflow.drop_in.replicas import is_built, rank_local_variables

# Each must be the same on all ranks; the text names it in the message.
_ALIKE = {
    "steps": "number of batches an epoch",
    "epochs": "number of epochs",
    "initial_epoch": "initial_epoch",
    "steps_per_execution": "steps_per_execution",
    "class_weight": "class_weight",
    "steering": "callbacks that act on training",
    "weights": "weights that train",
}
_REMEDIES = {
    "steps": "give all ranks as many samples and the same batch size, or repeat the data and pass steps_per_epoch",
    "epochs": "pass the same number on all ranks",
    "initial_epoch": "pass the same number on all ranks, as by hvd.broadcast_object(initial_epoch, 0)",
    "steps_per_execution": "compile with the same number on all ranks",
    "class_weight": "count the classes in the samples of all ranks",
    "steering": "give all ranks the same ones in the same order; ModelCheckpoint, BackupAndRestore, loggers and "
    "TensorBoard may be on rank 0 alone",
    "weights": "build the same model, and set `trainable` alike before compile",
    "validation": "pass it on all ranks or on none, since the callbacks {readers} read its metrics",
}

# Callbacks that only watch or write. BackupAndRestore may be on rank 0 alone, since the broadcast includes its epoch.
_LOCAL = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def plan_of_fit(
    model: keras.Model, arguments: Mapping[str, Any], callbacks: Sequence[Any], steps: Any
) -> dict[str, Any]:
    """Return what this rank is about to do, serialisable as JSON.

    arguments: those of `fit`.
    steps: the batches of an epoch, or None if Keras does not know.
    """
    validates = arguments.get("validation_data") is not None or bool(arguments.get("validation_split"))
    return {
        "steps": steps,
        "files": sorted({_file_of(callback) for callback in callbacks} - {""}),
        "samples": _num_samples(arguments.get("x")),
        "validation_samples": _num_samples(arguments.get("validation_data"), batches=True),
        "epochs": arguments.get("epochs", 1),
        "initial_epoch": arguments.get("initial_epoch", 0),
        "steps_per_execution": model.steps_per_execution,
        "class_weight": str(arguments.get("class_weight") or None),
        "steering": [type(callback).__name__ for callback in callbacks if _steers(callback)],
        "validation": f"every {arguments.get('validation_freq', 1)} epochs" if validates else "none",
        "weights": _weights_of(model, callbacks) if is_built(model) else None,
        "readers": sorted({type(callback).__name__ for callback in callbacks if _reads_validation(callback)}),
        "may_run_out": steps is None or (arguments.get("steps_per_epoch") is not None and not _is_endless(arguments)),
        "may_stop_in_epoch": any(map(_may_stop_in_epoch, callbacks)),
    }


def difference(plans: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str | None:
    """Return the line that tells how the plans of the ranks differ, or None if they agree."""
    files = [file for plan in plans for file in plan["files"]]
    if twice := sorted(file for file in set(files) if files.count(file) > 1):
        return (
            f"expected one rank to write {twice[0].partition(':')[2]}; received several, which would overwrite each "
            "other's; give ModelCheckpoint, BackupAndRestore and CSVLogger to rank 0 alone."
        )
    names = [*_ALIKE]
    readers = sorted({reader for plan in plans for reader in plan["readers"]})
    if readers:
        names.append("validation")
    for name in names:
        values = [plan[name] for plan in plans]
        if name in ("steps", "weights") and None in values:  # found out when a rank has run out of batches, or is built
            continue
        if any(value != values[0] for value in values):
            told = [", ".join(value) or "none" if isinstance(value, list) else value for value in values]
            remedy = _REMEDIES[name].format(readers=", ".join(readers))
            what = _ALIKE.get(name, "validation data in fit")
            return f"expected the same {what} on all ranks; received {per_rank(told, ranks)}; {remedy}."
    return None


def _weights_of(model: keras.Model, callbacks: Sequence[Any]) -> str:
    """Return the number of weights that train, and of their numbers, except those that differ by rank."""
    sends = [one for one in callbacks if isinstance(one, BroadcastGlobalVariablesCallback)]
    own = rank_local_variables(model, set().union(*(one.local_variables for one in sends)))
    variables = [variable for variable in model.trainable_variables if native(variable).ref() not in own]
    return f"{len(variables)} with {sum(math.prod(variable.shape) for variable in variables)} numbers"


def _num_samples(data: Any, *, batches: bool = False) -> int | None:
    """Return the number of samples in arrays, or else of `batches`; None if it is not known."""
    sizes = [one.shape[0] for one in keras.tree.flatten(data) if hasattr(one, "shape")]
    try:
        return sizes[0] if sizes else len(data) if batches else None
    except TypeError:  # it has no length, or an unknown one
        return None


def _file_of(callback: Any) -> str:
    """Return the host and the path that a callback of Keras writes on each rank that has it, or nothing."""
    attributes = {"ModelCheckpoint": "filepath", "BackupAndRestore": "backup_dir", "CSVLogger": "filename"}
    path = getattr(callback, attributes.get(type(callback).__name__, ""), None)
    return f"{hvd.cross_rank()}:{os.path.abspath(path)}" if path else ""


def _steers(callback: Any) -> bool:
    """Return whether a callback of Keras or of the drop-in acts on training; others can only be known to their user."""
    return not isinstance(callback, _LOCAL) and _is_known(callback)


def _is_known(callback: Any) -> bool:
    names = [kind.__module__ for kind in type(callback).__mro__]
    ours_or_keras = [name for name in names if name.startswith(("keras.", "allstep."))]
    # Keras' base class and LambdaCallback say nothing about what a callback does.
    return any(not name.endswith((".callback", ".lambda_callback")) for name in ours_or_keras)


def _reads_validation(callback: Any) -> bool:
    monitored = getattr(callback, "monitor", None)
    steers_by_it = isinstance(callback, (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau))
    return getattr(callback, "averages_metrics", False) or (steers_by_it and str(monitored).startswith("val_"))


def _may_stop_in_epoch(callback: Any) -> bool:
    """Return whether a callback may set `stop_training` at the end of a batch: TerminateOnNaN, and a user's."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return True
    methods = (
        callback.on_train_batch_end,
        callback.on_batch_end,
        callback.on_train_batch_begin,
        callback.on_epoch_begin,
    )
    return not _is_known(callback) and not all(map(_is_default, methods))


def _is_default(method: Any) -> bool:
    return getattr(method, "_is_default", False)


def _is_endless(arguments: Mapping[str, Any]) -> bool:
    data = arguments.get("x")
    return isinstance(data, tf.data.Dataset) and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
