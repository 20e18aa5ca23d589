"""Networks from a user's file or from keras.applications; `pytorch/other_networks.py` has those for PyTorch.

Weights of top-level layers that PyTorch also has get its names and layouts, by the names of the layers
(`models.canonical_weights`); other weights keep their paths in Keras. The network draws its initial weights by --seed,
and all ranks start from those of rank 0. If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls
its function, and both start from the suite's canonical weights, so that their curves can be compared. A dictionary
NAMES in the file maps names of Keras layers to their names in PyTorch, if these differ.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.base.terminal import print_line
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import cannot_build, check_outputs, network_of_user, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import TRIAL, Trial, are_probabilities
from allstep.tensorflow.compat import global_seed_generator, layers_of
from allstep.tensorflow.models import canonical_weights


def build_other(
    model: str, dataset: Dataset, seed: int, own: Any = None, options: Mapping[str, Any] | None = None
) -> keras.Model:
    """Build the network that `model` names and try it on two samples of zeros.

    Args:
        model: FILE.py:FUNCTION or keras:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.

    Raises:
        UserError: no network has that name, it cannot be built, or its outputs do not fit the data set.
    """
    keras.utils.set_random_seed(seed % 2**32)  # NumPy's seeds have 32 bits
    file = user_file.parse(model)
    if own is not None or file:
        network = network_of_user(model, "tensorflow", dataset, own, options or {}, kind=keras.Model)
        if not isinstance(network, keras.Model):
            raise UserError(
                f"expected a keras.Model from --model {model}, received {type(network).__name__}; return one"
            )
        _check_layers(network, model)
        expected = f"a network for samples of shape {dataset.input_shape}"
        outputs = user_file.call(_outputs, network, dataset, model, flag=f"--model {model}", expected=expected)
    else:
        try:
            network = _keras(model.partition(":")[2], dataset, options or {})
            outputs = _outputs(network, dataset, model)
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


def _keras(name: str, dataset: Dataset, given: Mapping[str, Any]) -> keras.Model:
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
        **given,
    )


def _outputs(network: keras.Model, dataset: Dataset, model: str) -> object:
    """Return the network's outputs for two samples of zeros.

    It is tried in training as well, with two kinds of samples, to see what changes in a pass; all variables stay as
    they are.

    Returns: outputs in validation, or those in training if these have another shape.
    """
    shape, dtype = (2, *dataset.input_shape), np.int64 if dataset.input_type == "int64" else np.float32
    inputs = np.zeros(shape, dtype)
    outputs = network(inputs, training=False)
    if getattr(outputs, "_keras_mask", None) is not None:
        raise UserError(
            f"--model {model} ends in a mask of its outputs, which Keras' losses heed and the trainer's do not; "
            "end the mask before, as a recurrent layer does"
        )
    trained, changed = _trained(network, inputs)
    # What changes alike with all samples counts passes, and does not look at samples.
    _, by_others = _trained(network, np.ones(shape, dtype)) if changed else (None, {})
    alike = [path for path in changed.keys() & by_others.keys() if np.array_equal(changed[path], by_others[path])]
    weights = {variable.path for variable in network.trainable_variables}
    trial = Trial(
        sets=next((path for path in changed if path in weights and path not in alike), None),
        counts=next((path for path in changed if path in alike or changed[path].dtype.kind in "iu"), None),
        ends_in_softmax=isinstance(outputs, tf.Tensor) and are_probabilities(tf.cast(outputs, tf.float32).numpy()),
    )
    setattr(network, TRIAL, trial)
    if not isinstance(trained, tf.Tensor) or not isinstance(outputs, tf.Tensor):
        return None
    return outputs if trained.shape == outputs.shape else trained


def _trained(network: keras.Model, inputs: np.ndarray) -> tuple[object, dict[str, np.ndarray]]:
    """Return the outputs of a pass in training, and what it makes of variables; the network keeps those of before.

    Random states and the running statistics of Keras' batch norms are left out.
    """
    before = [(variable, variable.value.numpy()) for variable in network.variables]
    outputs, changed = network(inputs, training=True), {}
    for variable, value in before:
        after = variable.value.numpy()
        variable.assign(value)
        is_known = variable.path.endswith(_SEED) or "/moving_" in variable.path
        if not is_known and value.tobytes() != after.tobytes():
            changed[variable.path] = after
    return outputs, changed


def _check_layers(network: keras.Model, model: str) -> None:
    """Refuse what would be trained in another way than Keras trains it, or cannot be trained on ranks at all."""
    for name in ("train_step", "test_step", "compute_loss"):
        if getattr(getattr(network, name), "__func__", None) is not getattr(keras.Model, name):
            raise UserError(
                f"expected a network with the {name} of Keras from --model {model}, received {type(network).__name__} "
                "with its own, which the trainer does not call; add to the loss by add_loss in call, or train by fit "
                "with allstep.tensorflow.horovod_keras"
            )
    if network.compiled and apparent_rank() == 0:
        print_line(
            f"allstep: --model {model} is compiled; the loss and the optimizer of the run replace those of compile",
            sys.stderr,
        )
    wanted = keras.config.dtype_policy().compute_dtype
    computes = {layer.compute_dtype for layer in layers_of(network) if layer.weights or not layer.built}
    if wanted != "float16" and "float16" in computes:
        raise UserError(
            f"--model {model} computes in float16, where gradients vanish without a loss scale; give --precision fp16"
        )
    if wanted != "float32" and computes and wanted not in computes:
        raise UserError(
            f"--model {model} was built before --precision could tell its layers to compute in {wanted}; give a "
            "function that builds it"
        )
    for layer in layers_of(network):
        if getattr(layer, "stateful", False):
            raise UserError(
                f"expected samples that do not depend on each other for --model {model}, received {layer.name}, which "
                "takes its state from the batch before; leave stateful=True out"
            )
    inputs = keras.tree.flatten(getattr(network, "inputs", None) or [])
    if sizes := [tensor.shape[0] for tensor in inputs if tensor.shape[0] is not None]:
        raise UserError(
            f"expected a network for batches of any size from --model {model}, received one for batches of {sizes[0]} "
            "alone; leave the size out: Input(shape=...) without batch_size or batch_shape"
        )


def _check_weights(network: keras.Model, model: str) -> None:
    if odd := [variable.path for variable in network.weights if variable.dtype in ("float16", "bfloat16", "float64")]:
        raise UserError(f"expected weights in float32 of --model {model}, received others, as {odd[0]}; convert them")
    if odd := [variable.path for variable in network.weights if getattr(variable, "overwrite_with_gradient", False)]:
        raise UserError(f"--model {model} has {odd[0]}, a scale of float8, which is no weight; leave float8 out")
    if not network.trainable_variables:
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


_SEED = "seed_generator_state"
"""End of the paths of Keras' random states."""


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: keras.Model) -> None:
        own = [variable for variable in network.variables if variable.path.endswith(_SEED)]
        # The last one is for what draws without a generator: keras.random.normal(shape).
        self._states = [*own, global_seed_generator().state]

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        for number, state in enumerate(self._states):
            state.assign(np.array([(seed + number) % 2**32, seed >> 32], np.uint32))

    on_step = on_start
