"""Inputs of a step: samples of a batch on the device, decoded and normalised. `tensorflow/inputs.py` has the same."""

from collections.abc import Callable

import torch

from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.pytorch.jpeg_decoding import JpegDecoder


class Inputs:
    """Copies samples to this rank's device and normalises them by the data set's mean and deviation."""

    def __init__(self, dataset: Dataset, device: torch.device, *, reports: bool) -> None:
        """`reports` tells whether this rank prints how pictures are decoded."""
        self.device, self._copy_stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decode = JpegDecoder(dataset.input_shape[0], device, tells=reports) if dataset.encoded else None
        self._are_tokens, self._are_images = dataset.input_type == "int64", len(dataset.input_shape) == 3
        self._normalise = normalisation(dataset, device)

    def __call__(self, batch: Batch, begin: int = 0, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs, normalised unless they are tokens, and targets of the samples [begin, end) of `batch`."""
        inputs, targets = batch.inputs[begin:end], self._copy(torch.as_tensor(batch.targets[begin:end]))
        inputs = self._decode(inputs) if self._decode else self._copy(torch.as_tensor(inputs))
        if self._are_tokens:
            return inputs, targets
        inputs = inputs.to(torch.float32, copy=True)  # on a CPU the memory is the data set's
        if self._are_images:
            # Channels stay last in memory, as they are read, which makes convolutions faster.
            inputs = inputs.permute(0, 3, 1, 2)
        return self._normalise(inputs), targets

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to this rank's device; a GPU may still be computing the previous step meanwhile."""
        if self._copy_stream is None or tensor.is_cuda:  # a benchmark's samples may be there already
            return tensor.to(self.device)
        with torch.cuda.stream(self._copy_stream):
            copy = tensor.pin_memory().to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._copy_stream)
        copy.record_stream(computing)
        return copy


def normalisation(dataset: Dataset, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that normalises float32 samples, with channels first, in place."""
    axes = (1, 1) if len(dataset.input_shape) == 3 else ()
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device).view(-1, *axes)
        for values in (dataset.mean, dataset.std)
    )
    if dataset.input_type == "uint8":
        scale, shift = 1 / (255 * std), -mean / std
        return lambda inputs: inputs.mul_(scale).add_(shift)
    # A mean may be many times the deviation; a scaled shift would lose its digits.
    inverse = 1 / std
    return lambda inputs: inputs.sub_(mean).mul_(inverse)
