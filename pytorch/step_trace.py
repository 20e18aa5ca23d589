"""What --trace looks at in a step: see `common/trace.py`; `tensorflow/step_trace.py` has the same."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import torch

from allstep.common.data.loader import Batch
from allstep.common.trace import LANES, OFFSET, OpenRecorder, digest, odd_weights


class StepTrace:
    """Digests of the steps of a rank.

    Looked at are the gradient of each weight as a pass hands it out, before Horovod or DDP sends it; the averaged ones,
    before they are changed; the weights after the step; and, at the output of each module that has weights of its own,
    the gradient of one sample a pass, another one in each step: all of them would cost as much as the pass's own
    traffic to memory.
    """

    part = 0
    """Number of the slice that is computed; 0 without slices."""

    def __init__(self, network: torch.nn.Module, open_recorder: OpenRecorder) -> None:
        """`network` gets hooks for good."""
        # In the order of backward, in which a fault goes from one to the next.
        weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        weights = dict(reversed(weights.items()))
        modules = {name: module for name, module in network.named_modules() if list(module.parameters(recurse=False))}
        modules = dict(reversed(modules.items()))
        self._recorder = open_recorder(list(modules), list(weights))
        header, self._parameters = self._recorder.header, list(weights.values())
        row = np.arange(header.row_type.itemsize // 8).view(header.row_type)[0]
        self._columns: dict[str, np.ndarray] = {name: row[name] for name in header.row_type.names or ()}
        self._row: np.ndarray | None = None
        self._found: list[tuple[int, torch.Tensor | int]] = []
        self._unwritten: deque[_Found] = deque()
        self._knows_weights = False
        for index, parameter in enumerate(self._parameters):
            parameter.register_hook(partial(self._see_local, index))
        for index, module in enumerate(modules.values()):
            module.register_forward_hook(partial(self._watch, index))

    def begin_step(self, batch: Batch, learning_rate: float) -> None:
        """A step begins on this rank's part of a global batch."""
        self._row, self._found = self._recorder.begin(batch, learning_rate), []
        if not self._knows_weights:  # later on they are those after the step before
            self._see_all("weights_before", self._parameters)
            self._knows_weights = True

    def see_average(self) -> None:
        """Look at the averaged gradients, before they are changed."""
        self._see_all("reduced_gradients", [parameter.grad for parameter in self._parameters])

    def end_step(self) -> None:
        """Look at the weights after the step, and write those of a step before: a GPU may still compute this one."""
        self._see_all("weights_after", self._parameters)
        assert self._row is not None
        self._unwritten.append(_Found(self._row, self._found))
        self._row = None
        self._write(num_left=1 if self._parameters[0].is_cuda else 0)

    def close(self) -> None:
        """Write what is there."""
        self._write(num_left=0)

    def _write(self, num_left: int) -> None:
        while len(self._unwritten) > num_left:
            self._recorder.write(self._unwritten.popleft().settle())

    def _see_all(self, field: str, tensors: list) -> None:
        for column, tensor in zip(self._columns[field], tensors, strict=True):
            if tensor is not None:
                self._found.append((column, tensor_digest(tensor)))

    def _see_local(self, index: int, gradient: torch.Tensor) -> None:
        if self._row is not None:
            column = self._columns["local_gradients"][self.part, index]
            self._found.append((column, tensor_digest(gradient)))

    def _watch(self, index: int, module: torch.nn.Module, inputs: object, output: object) -> None:
        if self._row is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._see_activation, index))

    def _see_activation(self, index: int, gradient: torch.Tensor) -> None:
        if self._row is None or not gradient.ndim or not len(gradient):
            return
        sample = gradient[int(self._row["step"]) % len(gradient)]
        # In the order of memory, which is another one where channels are last.
        sample = sample.permute(sorted(range(sample.ndim), key=lambda axis: -sample.stride(axis)))
        self._found.append((self._columns["activations"][self.part, index], tensor_digest(sample)))


class _Found:
    """A row, and the digests that belong into it, which a GPU may still have to compute."""

    def __init__(self, row: np.ndarray, found: list[tuple[int, torch.Tensor | int]]) -> None:
        self._row, self._columns = row, [column for column, _ in found]
        digests = [value for _, value in found]
        self._is_there: torch.cuda.Event | None = None
        if on_gpu := [value for value in digests if isinstance(value, torch.Tensor)]:
            # All go to the host at once, and nobody waits.
            self._digests = torch.stack(on_gpu).to("cpu", non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()
        else:
            self._digests = torch.tensor(digests)

    def settle(self) -> np.ndarray:
        """The row with its digests; those of several passes are added up."""
        if self._is_there:
            self._is_there.synchronize()
        np.add.at(self._row.reshape(1).view(np.int64), self._columns, self._digests.numpy())
        return self._row


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor | int:
    """What `common.trace.digest` gives of a tensor's values; on a GPU, () int64 there, for which nobody waits."""
    data = tensor.detach().reshape(-1)
    if not data.is_cuda:
        return digest(data.view(torch.uint8).numpy())
    if data.storage_offset() * data.element_size() % 8:  # words begin at multiples of their size
        data = data.clone()
    data = data.view(torch.uint8)
    weights = _weights(data.device)
    num_rows = data.numel() // (8 * LANES)
    last = torch.nn.functional.pad(data[num_rows * 8 * LANES :], (0, (num_rows + 1) * 8 * LANES - data.numel()))
    rows = [data[: num_rows * 8 * LANES].view(torch.int64).view(-1, LANES), last.view(torch.int64)[None]]
    sums = torch.cat([(part * weights).sum(1) for part in rows])
    return (sums * _weights(data.device, num_rows + 1)).sum() + OFFSET


def _weights(device: torch.device, count: int = LANES) -> torch.Tensor:
    if (device, count) not in _WEIGHTS:
        _WEIGHTS[device, count] = torch.from_numpy(odd_weights(count)).to(device)
    return _WEIGHTS[device, count]


_WEIGHTS: dict[tuple[torch.device, int], torch.Tensor] = {}
"""Those of each device, by their number."""
