"""Networks from a user's file or from keras.applications; `pytorch/other_networks.py` has those for PyTorch.

Weights of top-level layers that PyTorch also has get its names and layouts, by the names of the layers
(`models.canonical_weights`); other weights keep their paths in Keras. The network draws its initial weights by --seed,
and all ranks start from those of rank 0. If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls
its function, and both start from the suite's canonical weights, so that their curves can be compared. A dictionary
NAMES in the file maps names of Keras layers to their names in PyTorch, if these differ.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import cannot_build, check_outputs, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.tensorflow.models import canonical_weights


def build_other(model: str, dataset: Dataset, seed: int, own: Any = None) -> keras.Model:
    """Build the network that `model` names and try it on two samples of zeros.

    Args:
        model: FILE.py:FUNCTION or keras:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.

    Raises:
        UserError: no network has that name, it cannot be built, or its outputs do not fit the data set.
    """
    keras.utils.set_random_seed(seed % 2**32)  # NumPy's seeds have 32 bits
    file = user_file.parse(model)
    if own is not None or file:
        network = _of_user(model, dataset, own)
        if not isinstance(network, keras.Model):
            raise UserError(
                f"expected a keras.Model from --model {model}, received {type(network).__name__}; return one"
            )
        outputs = user_file.call(_outputs, network, dataset, flag=f"--model {model}")
    else:
        try:
            network = _keras(model.partition(":")[2], dataset)
            outputs = _outputs(network, dataset)
        except UserError:
            raise
        except Exception as error:
            raise cannot_build(model, dataset, error) from error
    check_outputs(model, tuple(outputs.shape) if isinstance(outputs, tf.Tensor) else None, dataset)
    _check_weights(network, model)
    in_pytorch = (user_file.find(file[0], "NAMES", "--model") if file else None) or {}
    for layer in network.layers:
        layer.canonical_name = in_pytorch.get(layer.name, layer.name)
    names = [weight.name for weight in canonical_weights(network)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"expected a name of its own for each weight of --model {model}, received {min(twice)} twice; name the "
            "layers"
        )
    return network


def _of_user(model: str, dataset: Dataset, own: Any) -> object:
    """Return the network that a program passes or a file builds."""
    if isinstance(own, keras.Model):
        return own
    file = user_file.parse(model)
    build = user_file.import_for("tensorflow", *file, "--model") if file else own
    return user_file.call(build, dataset.input_shape, dataset.num_classes, flag="--model")


def _keras(name: str, dataset: Dataset) -> keras.Model:
    functions = {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    if name not in functions:
        raise unknown_name(f"keras:{name}", functions)
    # Some of these networks can normalise pixels, which the loader has already done.
    known = inspect.signature(functions[name]).parameters
    options = {"include_preprocessing": False} if "include_preprocessing" in known else {}
    return functions[name](
        weights=None,
        input_shape=dataset.input_shape,
        classes=dataset.num_classes,
        classifier_activation=None,
        **options,
    )


def _outputs(network: keras.Model, dataset: Dataset) -> object:
    """Return the network's outputs for two samples of zeros."""
    inputs = np.zeros((2, *dataset.input_shape), np.int64 if dataset.input_type == "int64" else np.float32)
    return network(inputs, training=False)


def _check_weights(network: keras.Model, model: str) -> None:
    if odd := [variable.path for variable in network.weights if variable.dtype in ("float16", "bfloat16", "float64")]:
        raise UserError(f"expected weights in float32 of --model {model}, received others, as {odd[0]}; convert them")
    if not network.trainable_variables:
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: keras.Model) -> None:
        self._states = [variable for variable in network.variables if variable.path.endswith("seed_generator_state")]

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        for number, state in enumerate(self._states):
            state.assign(np.array([(seed + number) % 2**32, seed >> 32], np.uint32))

    on_step = on_start
