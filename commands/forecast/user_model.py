"""A user's network as a forecast needs it: its real tensors in the order of a forward pass, tried on one sample."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from allstep.commands.forecast.networks import Layer, Network
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file

FLAG = "--model"


def read_model(word: str, framework: str, input_shape: Sequence[int], num_classes: int) -> Network:
    """Build the network of FILE.py:FUNCTION and return its layers.

    `framework` is pytorch or tensorflow, `input_shape` (height, width, channels) of an image, or (length,) of a text.
    Raises UserError if the file or the function is missing or fails, or the network cannot be tried.
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
    never calls. The gradient of a tensor that is used again is ready after its first use's backward, the last to run.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UserError(f"expected a torch.nn.Module from {FLAG}, received {type(model).__name__}; return one")
    calls: list[tuple[str, int]] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: calls.append((name, _positions(output)))
        )
        for name, module in model.named_modules()
        if module is not model
    ]
    model.eval()
    with torch.no_grad():
        output = model(_torch_sample(model, input_shape))
    calls.append(("", _positions(output)))  # no hook: a model that overrides __call__ would not run it
    for hook in hooks:
        hook.remove()
    owned = _tensors(model, {name for name, _ in calls})
    layers, counted = [], set()
    for name, positions in calls:
        new = [one for one in owned.get(name, ()) if id(one) not in counted]
        counted |= set(map(id, new))
        is_lookup = isinstance(model.get_submodule(name), torch.nn.Embedding)
        work = 0 if is_lookup else positions * sum(one.numel() for one in owned.get(name, ()) if one.ndim > 1)
        if new or work:
            layers.append(Layer(name, sum(one.numel() for one in new), float(work), len(new)))
    return layers


def _tensors(model: Any, called: set[str]) -> dict[str, list[Any]]:
    """Return the tensors that train of each module that is called; a tied tensor is listed for each use.

    `called` are names of modules, with that of the model itself, "".
    """
    found: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        while owner not in called:
            owner = owner.rpartition(".")[0]
        if parameter.requires_grad:
            found.setdefault(owner, []).append(parameter)
    return found


def _torch_sample(model: Any, input_shape: tuple[int, ...]) -> Any:
    """Return one sample: an image, a text's tokens for a network with embeddings, or else numbers."""
    import torch

    if len(input_shape) == 3:
        return torch.zeros(1, *input_shape).permute(0, 3, 1, 2)
    is_text = any(isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) for module in model.modules())
    return torch.zeros(1, *input_shape, dtype=torch.int64 if is_text else torch.float32)


def _positions(output: Any) -> int:
    """Return at how many positions a module multiplies by its weights: pixels of (n, c, h, w), tokens of (n, l, c)."""
    while isinstance(output, (tuple, list, dict)) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    shape = tuple(getattr(output, "shape", ()))
    return math.prod(shape[2:]) if len(shape) == 4 else math.prod(shape[1:-1])


def _keras_layers(model: Any, input_shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers of a Keras model in the order in which it lists them."""
    import keras

    if not isinstance(model, keras.Model):
        raise UserError(f"expected a keras.Model from {FLAG}, received {type(model).__name__}; return one")
    if not model.built:
        model.build((None, *input_shape))
    layers, seen = [], set()
    for layer, positions in _keras_tree(model, 1):
        tensors = [variable for variable in layer._trainable_variables if variable.trainable]
        if tensors and id(layer) not in seen:
            seen.add(id(layer))
            work = 0 if isinstance(layer, keras.layers.Embedding) else positions
            work *= sum(math.prod(one.shape) for one in tensors if len(one.shape) > 1 and one.name != "bias")
            layers.append(Layer(layer.name, sum(math.prod(one.shape) for one in tensors), float(work), len(tensors)))
    return layers


def _keras_tree(layer: Any, positions: int) -> Iterator[tuple[Any, int]]:
    """Yield all layers in a layer, each with its number of positions, or that of the layer around it if unknown."""
    import keras

    for child in layer._flatten_layers(include_self=False, recursive=False):  # Keras has no public way into layers
        here = positions
        if child._inbound_nodes:
            here = math.prod(size or 1 for size in keras.tree.flatten(child.output)[0].shape[1:-1])
        yield child, here
        yield from _keras_tree(child, here)
