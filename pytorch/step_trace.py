"""Values of a step that --trace digests: see `common/exact/trace.py`. `tensorflow/step_trace.py` has the same."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from allstep.common.data.loader import Batch
from allstep.common.exact.replica_check import digest
from allstep.common.exact.trace import OpenRecorder
from allstep.pytorch.observer import Observer

_LANES = 512
"""Number of words in a row, over which a GPU sums first."""
_OFFSET = 0x5EED
"""Digest of zeros on a GPU, since a digest of 0 means "not recorded"."""


class StepTrace(Observer):
    """Records digests of the steps of a rank.

    These are digests of the gradient of each weight in a pass, before Horovod or DDP sends it, or in a slice; of the
    averaged gradients before they are changed; of the weights after the step; and of the gradient at the output of each
    module with weights, for one sample per pass, a different one in each step. All samples would cost as much memory
    traffic as the pass itself.

    Between two kernels Python code is not in the processor's caches and takes ten times as long, so most of the work is
    done after the passes.
    """

    def __init__(self, network: torch.nn.Module, open_recorder: OpenRecorder, *, sliced: bool) -> None:
        """`network` keeps the hooks that it gets; with `sliced`, `see_slice` is called for each slice."""
        # In the order of the backward pass, in which a fault spreads.
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
        self._samples: list[tuple[int, torch.Tensor]] = []
        self._step = 0
        self._places: dict[torch.Tensor, int] = {one: placement for placement, one in enumerate(self._parameters)}
        self._unwritten: deque[_Found] = deque()
        self._knows_weights = False
        self._part = 0
        for index, parameter in enumerate(self._parameters if not sliced else ()):
            parameter.register_hook(partial(self._see_local, index))
        for index, module in enumerate(modules.values()):
            module.register_forward_hook(partial(self._watch, index))

    def begin(self, batch: Batch, learning_rate: float, num_steps: int) -> None:
        self._row, self._found, self._samples = self._recorder.begin(batch, learning_rate), [], []
        self._step = int(self._row["step"])
        if not self._knows_weights:  # later on they are those after the step before
            self._see_all(self._columns["weights_before"], self._parameters)
            self._knows_weights = True

    @contextlib.contextmanager
    def in_pass(self, number: int, factor: float) -> Iterator[None]:
        self._part = number
        yield

    def see_slice(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        columns = self._columns["local_gradients"][self._part]
        self._see_all(columns[[self._places[weight] for weight in weights]], gradients)

    def see_averages(self) -> None:
        self._see_all(self._columns["reduced_gradients"], [parameter.grad for parameter in self._parameters])

    def end(self) -> None:
        """Digest the weights after the step, and write an earlier step, since a GPU may still compute this one."""
        self._see_all(self._columns["weights_after"], self._parameters)
        self._found += [(column, tensor_digest(_in_order_of_memory(sample))) for column, sample in self._samples]
        assert self._row is not None
        self._unwritten.append(_Found(self._row, self._found))
        self._row = None
        self._write(num_left=1 if self._parameters[0].is_cuda else 0)

    def close(self) -> None:
        """Write all digests that are not written yet."""
        self._write(num_left=0)

    def _write(self, num_left: int) -> None:
        while len(self._unwritten) > num_left:
            self._recorder.write(self._unwritten.popleft().settle())

    def _see_all(self, columns: np.ndarray, tensors: Sequence[torch.Tensor | None]) -> None:
        for column, tensor in zip(columns.tolist(), tensors, strict=True):
            if tensor is not None:
                self._found.append((column, tensor_digest(tensor)))

    def _see_local(self, index: int, gradient: torch.Tensor) -> None:
        if self._row is not None:
            column = self._columns["local_gradients"][self._part, index]
            self._found.append((column, tensor_digest(gradient)))

    def _watch(self, index: int, module: torch.nn.Module, inputs: object, output: object) -> None:
        if self._row is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(self._see_activation, index))

    def _see_activation(self, index: int, gradient: torch.Tensor) -> None:
        if self._row is not None and gradient.ndim and len(gradient):
            sample = gradient[self._step % len(gradient)].clone()
            self._samples.append((self._columns["activations"][self._part, index], sample))


class _Found:
    """Row of a trace with its digests, which a GPU may still be computing."""

    def __init__(self, row: np.ndarray, found: list[tuple[int, torch.Tensor | int]]) -> None:
        self._row, self._columns = row, [column for column, _ in found]
        digests = [value for _, value in found]
        self._is_there: torch.cuda.Event | None = None
        if on_gpu := [value for value in digests if isinstance(value, torch.Tensor)]:
            # All go to the host at once, without waiting.
            self._digests = torch.stack(on_gpu).to("cpu", non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()
        else:
            self._digests = torch.tensor(digests)

    def settle(self) -> np.ndarray:
        """Return the row with its digests; those of several passes are added up."""
        if self._is_there:
            self._is_there.synchronize()
        np.add.at(self._row.reshape(1).view(np.int64), self._columns, self._digests.numpy())
        return self._row


def _in_order_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose axes are in the order of memory, so that it has no gaps."""
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis)))


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor | int:
    """Return a 64-bit digest of a tensor's values in the order of its axes; on a GPU an int64 tensor () to read later.

    On a GPU it is a sum over 64-bit words modulo 2^64, each times two odd weights that depend on its position
    (multilinear hashing: Carter and Wegman 1979). A change of a single word always changes the digest, any other change
    with a probability of 1 - 2^-64.
    """
    data = tensor.detach().reshape(-1)
    if not data.is_cuda:
        return digest(data.view(torch.uint8).numpy())
    if data.storage_offset() * data.element_size() % 8:  # words begin at multiples of their size
        data = data.clone()
    data = data.view(torch.uint8)
    weights = _weights(data.device)
    num_rows = data.numel() // (8 * _LANES)
    last = torch.nn.functional.pad(data[num_rows * 8 * _LANES :], (0, (num_rows + 1) * 8 * _LANES - data.numel()))
    rows = [data[: num_rows * 8 * _LANES].view(torch.int64).view(-1, _LANES), last.view(torch.int64)[None]]
    sums = torch.cat([(part * weights).sum(1) for part in rows])
    return (sums * _weights(data.device, num_rows + 1)).sum() + _OFFSET


def _weights(device: torch.device, count: int = _LANES) -> torch.Tensor:
    if (device, count) not in _WEIGHTS:
        _WEIGHTS[device, count] = torch.from_numpy(_odd_numbers(count)).to(device)
    return _WEIGHTS[device, count]


def _odd_numbers(count: int) -> np.ndarray:
    """Return odd numbers, int64 (count,), by the generator of Steele et al. 2014 (SplitMix64)."""
    z = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_WEIGHTS: dict[tuple[torch.device, int], torch.Tensor] = {}
"""Weights of each device, by their number."""
