"""Writes a trained network in PyTorch's formats and ONNX; `tensorflow/exporting.py` writes Keras' and TensorFlow's."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import torch
from torch import nn

from allstep.common.data.datasets import Dataset
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.inputs import normalisation
from allstep.pytorch.loaded import LoadedNetwork

_OPSET = 18


class _WithScaling(nn.Module):
    """A network that takes samples as they are in the data set, with channels first."""

    def __init__(self, network: nn.Module, dataset: Dataset, device: torch.device) -> None:
        super().__init__()
        self.network, self._normalise = network, normalisation(dataset, device)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.network(self._normalise(samples.to(torch.float32, copy=True)))


def write(form: str, path: Path, network: LoadedNetwork, dataset: Dataset, *, scales: bool) -> None:
    """Write a network, or raise the exporter's exception for those that it cannot export.

    `form` is state-dict, safetensors, torch-export or onnx; `scales` tells whether the graph takes samples as they are
    in the data set.
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
    dynamic = ({0: torch.export.Dim("batch")},)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):  # torch prints graphs that it refuses
            stack.enter_context(redirect(io.StringIO()))
        exported = torch.export.export(model, (example,), dynamic_shapes=dynamic)
        if form == "torch-export":
            torch.export.save(exported, path)
            return
        program = torch.onnx.export(
            exported,
            (),
            dynamo=True,
            opset_version=_OPSET,
            verbose=False,
            input_names=["input"],
            output_names=["logits"],
        )
        assert program is not None  # with dynamo
        program.save(path)
