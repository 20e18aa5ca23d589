"""Networks as a forecast needs them: the parameters of each layer and its share of the computation."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from allstep.commands.forecast.parameters import read_packaged
from allstep.common.base.errors import UserError
from allstep.common.files.records import NonNegative, from_json
from allstep.common.files.schema import Mismatch, anything, list_of

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
    """Return the networks of networks.yaml, by name."""
    return {name: _network(name, rows) for name, rows in read_packaged(_FILE)["networks"].items()}


def read_network(path: Path) -> Network:
    """Read a network from a YAML file: a list of `[name, parameters, multiplications, tensors]`, the last two optional.

    Raises UserError if the file has no such list.
    """
    from allstep.common.files import strict_yaml

    try:
        rows = strict_yaml.load(path, maximum=_MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _no_layers(path, error) from None
    try:
        return _network(path.stem, rows)
    except Mismatch as error:
        raise _no_layers(path, error) from None


def _no_layers(path: Path, error: Exception) -> UserError:
    return UserError(
        f"expected a YAML list of [name, parameters, multiplications, tensors] a layer, received {path}: "
        f"{' '.join(str(error).split())}"
    )


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
