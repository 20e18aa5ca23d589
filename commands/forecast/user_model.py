"""A user's network as a forecast needs it: its real tensors in the order of a forward pass, tried on one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from allstep.commands.forecast.networks import Layer, Network
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file

FLAG = "--model"


def read_model(word: str, framework: str, input_shape: Sequence[int], num_classes: int) -> Network:
    """Build the network of FILE.py:FUNCTION and return its layers.

    Args:
        framework: pytorch or tensorflow.
        input_shape: (height, width, channels) of an image, or (length,) of a text.

    Raises:
        UserError: the file or the function is missing or fails, or the network cannot be tried.
    """
    file = user_file.parse(word)
    if file is None:
        raise UserError(f"expected FILE.py:FUNCTION for {FLAG}, received {word}; use --network for a known network")
    build = user_file.import_for(framework, *file, FLAG)
    model = user_file.call(build, tuple(input_shape), num_classes, flag=FLAG)
    reader = {"pytorch": _torch_layers, "tensorflow": _keras_layers}[framework]
    layers = user_file.call(reader, model, tuple(input_shape), flag=FLAG)
    if not any(layer.num_parameters for layer in layers):
        raise UserError(f"expected a network with weights that train from {FLAG} {word}, received none")
    if not any(layer.multiplications for layer in layers):
        layers = [Layer(layer.name, layer.num_parameters, 1.0, layer.num_tensors) for layer in layers]
    return Network(word, tuple(layers))


def _torch_layers(model: Any, input_shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers of a torch module in the order in which one sample passes them.

    A tensor belongs to the innermost module around it that is called: attention uses the weights of children that it
    never calls. A module that is called again computes again, and its gradient is ready after its first call's backward.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UserError(f"expected a torch.nn.Module from {FLAG}, received {type(model).__name__}; return one")
    calls: list[tuple[str, int]] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: calls.append((name, _positions(output))))
        for name, module in model.named_modules()
    ]
    shape = (1, *input_shape)
    sample = torch.zeros(shape) if len(shape) == 4 else torch.zeros(shape, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        model(sample.permute(0, 3, 1, 2) if len(shape) == 4 else sample)
    for hook in hooks:
        hook.remove()
    called = {name for name, _ in calls}
    owned: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in called:
            owner = owner.rpartition(".")[0]
        if parameter.requires_grad:
            owned.setdefault(owner, []).append(parameter)
    layers, seen = [], set()
    for name, positions in calls:
        if name in owned:
            tensors = owned[name] if name not in seen else []
            is_lookup = isinstance(model.get_submodule(name), torch.nn.Embedding)
            work = 0 if is_lookup else positions * sum(one.numel() for one in owned[name] if one.ndim > 1)
            layers.append(Layer(name, sum(one.numel() for one in tensors), float(work), len(tensors)))
            seen.add(name)
    return layers


def _positions(output: Any) -> int:
    """Return at how many positions a module multiplies by its weights: pixels of (n, c, h, w), tokens of (n, l, c)."""
    while isinstance(output, (tuple, list)):
        output = output[0]
    shape = tuple(output.shape)
    return math.prod(shape[2:]) if len(shape) == 4 else math.prod(shape[1:-1])


def _keras_layers(model: Any, input_shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers of a Keras model in the order in which it lists them."""
    import keras

    if not isinstance(model, keras.Model):
        raise UserError(f"expected a keras.Model from {FLAG}, received {type(model).__name__}; return one")
    if not model.built:
        model.build((None, *input_shape))
    layers = []
    for layer in model._flatten_layers(include_self=False):  # Keras has no public way into nested models
        tensors = [variable for variable in layer._trainable_variables if variable.trainable]
        if tensors:
            shape = keras.tree.flatten(layer.output)[0].shape if layer._inbound_nodes else (None, 1)
            positions = math.prod(size or 1 for size in shape[1:-1])
            work = 0 if isinstance(layer, keras.layers.Embedding) else positions
            work *= sum(math.prod(one.shape) for one in tensors if len(one.shape) > 1)
            layers.append(Layer(layer.name, sum(math.prod(one.shape) for one in tensors), float(work), len(tensors)))
    return layers
