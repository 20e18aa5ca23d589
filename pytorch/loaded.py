"""Trained networks outside of a run, for `allstep.load` and `allstep export`: loading, and export to other formats.

`tensorflow/loaded.py` does the same.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.inputs import Inputs, normalisation
from allstep.pytorch.kept import network_state
from allstep.pytorch.models import build_network


class LoadedNetwork:
    """A network in evaluation mode on one device, with the normalisation of its samples."""

    def __init__(self, config: TrainConfig, dataset: Dataset, own: Any = None) -> None:
        """Build the network, whose weights `load` sets; the program's random generators stay as they are.

        Raises UserError if the device does not exist, and as `build_network` does.
        """
        if config.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device cuda needs a GPU that PyTorch can use, there is none; give cpu or auto")
        is_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if is_gpu else "cpu")
        with torch.random.fork_rng(), self.device:
            self.model, _ = build_network(config, dataset, own)
        self.model.eval()
        self._inputs = Inputs(dataset, self.device, reports=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by their names in checkpoints."""
        return {f"model/{name}": shape for name, shape in network_state.shapes(self.model)}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the weights, which have the names of checkpoints."""
        network_state.load_arrays(self.model, arrays, network_state.as_tensor)

    def inputs(self, samples: np.ndarray) -> torch.Tensor:
        """Return samples as the network takes them: normalised, images with channels first."""
        return self._inputs(Batch(samples, np.zeros(len(samples)), len(samples), 1, 1.0, Position(0, 0)))[0]

    def outputs(self, inputs: torch.Tensor) -> np.ndarray:
        """Return the outputs, float32 (n, ...)."""
        with torch.inference_mode():
            return self.model(inputs).float().numpy(force=True)


_OPSET = 18


class _WithScaling(nn.Module):
    """A network that takes samples as they are in the data set, with channels first."""

    def __init__(self, network: nn.Module, dataset: Dataset, device: torch.device) -> None:
        super().__init__()
        self.network, self._normalise = network, normalisation(dataset, device)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.network(self._normalise(samples.to(torch.float32, copy=True)))


def _exported(model: torch.nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    """Trace a network for batches of any size: by running it or, if that fixes the size, as len() does, by its code.

    Raises the exporter's exception of the run if both fail.
    """
    dynamic = ({0: torch.export.Dim("batch")},)
    try:
        return torch.export.export(model, (example,), dynamic_shapes=dynamic)
    except Exception as error:
        try:
            return torch.export.export(model, (example,), dynamic_shapes=dynamic, strict=True)
        except Exception:
            raise error from None


def write(form: str, path: Path, network: LoadedNetwork, dataset: Dataset, *, scales: bool) -> None:
    """Write a network in PyTorch's formats or ONNX.

    Raises the exporter's exception for a network that it cannot export. `form` is state-dict, safetensors, torch-export
    or onnx; `scales` tells whether the graph takes samples as they are in the data set.
    """
    model = network.model
    if form in ("state-dict", "safetensors"):
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        for name, module in model.named_modules():  # the suite's batch norms have no count, a library's expects one
            if isinstance(module, BatchNorm) and f"{name}.num_batches_tracked" not in state:
                state[f"{name}.num_batches_tracked"] = torch.tensor(0)
        if form == "state-dict":
            torch.save(state, path)
            return
        from safetensors.torch import save_file

        save_file(state, path)
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes the file private to its owner
        return
    shape = (2, *dataset.input_shape)
    example = torch.zeros(shape, dtype=getattr(torch, dataset.input_type))
    example = example.permute(0, 3, 1, 2).contiguous() if len(shape) == 4 else example
    if scales:
        model = _WithScaling(model, dataset, network.device).eval()
    elif dataset.input_type != "int64":
        example = example.to(torch.float32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):  # torch prints graphs that it refuses
            stack.enter_context(redirect(io.StringIO()))
        # Layers of transformers would be operators that ONNX lacks.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        exported = _exported(model, example)
        if form == "torch-export":
            written = io.BytesIO()  # torch 2.14 ends the process where a disk is full
            torch.export.save(exported, written)
            path.write_bytes(written.getbuffer())
            return
        names: dict[str, Any] = {"input_names": ["input"], "output_names": ["logits"]}
        try:
            program = torch.onnx.export(exported, (), dynamo=True, opset_version=_OPSET, verbose=False, **names)
        except Exception as error:
            while error.__cause__:  # the innermost cause names the operator
                error = error.__cause__
            raise error from None
        assert program is not None  # with dynamo
        program.save(path)
