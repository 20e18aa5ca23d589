"""Networks as a forecast needs them: the parameters of each layer and its share of the computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from allstep.commands.forecast.parameters import read_packaged
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.files.strict_json import Mismatch, NonNegative, anything, from_json, list_of

BYTES_PER_PARAMETER = 4
MAX_LAYERS = 50
"""Largest number of layers assumed for a network of which only the number of parameters is known."""
MIN_LAYER_PARAMETERS = 10_000
"""Least number of parameters that such a layer has: small networks have few layers."""
_FILE = Path(__file__).parent / "networks.yaml"
_MAX_BYTES = 2**20  # a hundred thousand layers


@dataclass(frozen=True)
class Layer:
    """A layer with the parameters that its backward pass makes ready at once."""

    name: str
    num_parameters: int
    multiplications: NonNegative = 1.0
    """Multiplications of a sample's forward pass, in any unit; they determine the layer's share of the time."""
    num_tensors: int = 2
    """Number of gradients: of a weight and a bias, or with batch norm of a weight and two of the norm."""


@dataclass(frozen=True)
class Network:
    """Layers in forward order."""

    name: str
    layers: tuple[Layer, ...]
    is_uniform: bool = False
    """Whether only the number of parameters is known."""

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    def with_tail(self, share: float) -> Network:
        """Return the network with this share of its parameters in a first layer that computes nothing, as embeddings.

        A network whose layers are known stays as it is.
        """
        if not self.is_uniform:
            return self
        tail = round(share * self.num_parameters)
        rest = uniform(self.num_parameters - tail, usual_layers(self.num_parameters))
        return replace(rest, layers=(Layer("tail", tail, 0.0, 1), *rest.layers))


@functools.cache
def known_networks() -> dict[str, Network]:
    """Return the networks of networks.yaml, and ResNets, by name."""
    found = {name: _resnet(*size) for name, size in _RESNETS.items()}
    for name, rows in read_packaged(_FILE)["networks"].items():
        found[name] = []
        for row in rows:
            copies = [[f"{row[0]}{number}", *row[1:4]] for number in range(*row[4:])] if row[4:] else [row]
            found[name] += copies
    return {name: _network(name, rows) for name, rows in found.items()}


_RESNETS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "resnet18": ((2, 2, 2, 2), 0, 1),
    "resnet50": ((3, 4, 6, 3), 64, 1),
    "resnet101": ((3, 4, 23, 3), 64, 1),
    "resnext50_32x4d": ((3, 4, 6, 3), 128, 32),
    "resnext101_32x8d": ((3, 4, 23, 3), 256, 32),
}
"""Blocks of each stage, width of the first bottlenecks (0 for blocks of two convolutions), and groups of channels."""


def _resnet(depths: Sequence[int], inner: int, groups: int) -> list[list[Any]]:
    """Return the layers of a ResNet on images of 224 x 224 pixels, with torchvision's names, as in networks.yaml."""

    def convolution(name: str, channels: int, width: int, size: int, pixels: int, groups: int = 1) -> list[Any]:
        weights = channels * width * size**2 // groups
        return [name, weights + 2 * width, weights * pixels**2, 3]

    rows, channels = [convolution("conv1", 3, 64, 7, 112)], 64
    for stage, depth in enumerate(depths):
        pixels, width, out = 56 >> stage, inner << stage, (256 if inner else 64) << stage
        for index in range(depth):
            name = f"layer{stage + 1}.{index}"
            if inner:
                before = 2 * pixels if stage and not index else pixels
                rows.append(convolution(f"{name}.conv1", channels, width, 1, before))
                rows.append(convolution(f"{name}.conv2", width, width, 3, pixels, groups))
                rows.append(convolution(f"{name}.conv3", width, out, 1, pixels))
            else:
                rows.append(convolution(f"{name}.conv1", channels, out, 3, pixels))
                rows.append(convolution(f"{name}.conv2", out, out, 3, pixels))
            if channels != out:
                rows.append(convolution(f"{name}.downsample.0", channels, out, 1, pixels))
            channels = out
    return [*rows, ["fc", 1000 * channels + 1000, 1000 * channels, 2]]


def read_network(path: Path) -> Network:
    """Read a network from a YAML file: a list of `[name, parameters, multiplications, tensors]`, the last two optional.

    Raises UserError if the file has no such list.
    """
    from allstep.common.files import strict_yaml

    try:
        return _network(path.stem, strict_yaml.load(path, maximum=_MAX_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected a YAML list of [name, parameters, multiplications, tensors] a layer, received {path}: "
            f"{' '.join(str(error).split())}"
        ) from None


def usual_layers(num_parameters: int) -> int:
    """Return the number of layers assumed for so many parameters."""
    return min(MAX_LAYERS, max(1, num_parameters // MIN_LAYER_PARAMETERS))


def uniform(num_parameters: int, num_layers: int | None = None) -> Network:
    """Return a network of equal layers, `num_layers` or a usual number, if only the number of parameters is known."""
    num_layers = num_layers or usual_layers(num_parameters)
    per_layer = [num_parameters * (i + 1) // num_layers - num_parameters * i // num_layers for i in range(num_layers)]
    layers = tuple(Layer(f"layer{i}", count, 1.0) for i, count in enumerate(per_layer))
    return Network("uniform", layers, is_uniform=True)


def _network(name: str, rows: Any) -> Network:
    """Return the network of a list of layers, each with its values in the order of `Layer`'s fields.

    Raises Mismatch if `rows` is no such list.
    """
    list_of(list_of(anything, minimum=2, maximum=4), minimum=1)(rows, "the list")
    names = [field.name for field in fields(Layer)]
    layers = tuple(
        from_json(Layer, dict(zip(names, (str(row[0]), *row[1:]), strict=False)), f"layer {number}")
        for number, row in enumerate(rows)
    )
    if not sum(layer.multiplications for layer in layers):
        raise Mismatch("expected a layer that multiplies, received none")
    return Network(name, layers)


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
