"""Restore an optimizer's state that Keras' own `load_model` loses: loss scaling, and the slots of .h5 files."""

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py
import keras

from allstep.tensorflow.compat import h5_optimizer_weights
from allstep.tensorflow.drop_in.optimizer import parts

_POLICY = "mixed_float16"


@contextlib.contextmanager
def policy_of_saved_optimizer(filepath: str | os.PathLike[str]) -> Iterator[None]:
    """Have Keras scale the loss of the model that it loads in the block, if the file's optimizer did.

    `compile` adds the scaling by the global policy, which the file does not hold; layers keep their own policies.
    """
    before = keras.config.dtype_policy()
    if _scales_loss(filepath):
        keras.config.set_dtype_policy(_POLICY)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _scales_loss(filepath: str | os.PathLike[str]) -> bool:
    """Return whether the file has the state of a loss scale; what is no saved model is left to Keras."""
    if zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            if "model.weights.h5" not in archive.namelist():
                return False
            with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
                return "optimizer/inner_optimizer" in file
    if h5py.is_hdf5(filepath):
        with h5py.File(filepath) as file:
            names = file["optimizer_weights"].attrs.get("weight_names", []) if "optimizer_weights" in file else []
            return any(b"dynamic_scale" in (name if isinstance(name, bytes) else name.encode()) for name in names)
    return False


def restore_h5_optimizer(model: keras.Model, filepath: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Replace the model's optimizer by one with the file's slots.

    Keras 3 builds the optimizer of an .h5 file for no variables, so it loses the slots and refuses to train.
    """
    steps = max(part.gradient_accumulation_steps or 0 for part in parts(model.optimizer))
    if steps and "backward_passes_per_step" not in options and not options.get("average_aggregated_gradients"):
        raise ValueError(
            f"expected backward_passes_per_step={steps} (the sum of the gradients) or average_aggregated_gradients="
            f"True (their mean), since {filepath} does not say; received neither. A .keras file keeps it."
        )
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        weights = h5_optimizer_weights(file)
        for variable, weight in zip(optimizer.variables, weights, strict=True):
            variable.assign(weight[()])
    model.optimizer = optimizer
