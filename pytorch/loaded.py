"""A trained network outside of a run, for `allstep.load` and `allstep export`; `tensorflow/loaded.py` has the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position
from allstep.pytorch.inputs import Inputs
from allstep.pytorch.kept import network_state
from allstep.pytorch.models import build_network


class LoadedNetwork:
    """A network in evaluation mode on one device, with the normalisation of its samples."""

    def __init__(self, config: TrainConfig, dataset: Dataset, own: Any = None) -> None:
        """Build the network, whose weights `load` sets; random numbers of the program stay as they are.

        Raises UserError if the device does not exist, and as `build_network` does.
        """
        if config.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device cuda needs a GPU that PyTorch can use, there is none; give cpu or auto")
        is_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if is_gpu else "cpu")
        with torch.random.fork_rng(), self.device:
            self.model = build_network(config, dataset, own)
        self.model.eval()
        self._inputs = Inputs(dataset, self.device, reports=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by their names in checkpoints."""
        return {f"model/{name}": shape for name, shape in network_state.shapes(self.model)}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the weights, which have the names of checkpoints."""
        entries = [(name, tensor) for name, tensor in network_state.entries(self.model) if f"model/{name}" in arrays]
        tensors = {name: network_state.as_tensor(arrays[f"model/{name}"], tensor) for name, tensor in entries}
        network_state.load(self.model, tensors)

    def inputs(self, samples: np.ndarray) -> torch.Tensor:
        """Return samples as the network takes them: normalised, images with channels first."""
        return self._inputs(Batch(samples, np.zeros(len(samples)), len(samples), 1, 1.0, Position(0, 0)))[0]

    def outputs(self, inputs: torch.Tensor) -> np.ndarray:
        """Return the outputs, float32 (n, ...)."""
        with torch.inference_mode():
            return self.model(inputs).float().cpu().numpy()
