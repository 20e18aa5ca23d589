"""The worker in PyTorch: one step of training, one of evaluation, and access to the weights."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from allstep.common.datasets import Dataset
from allstep.common.loader import Batch
from allstep.pytorch.models import export_weights, import_weights
from allstep.pytorch.strategies.single import Single

# Canonical names of optimizer slots, and PyTorch's.
_SLOT_NAMES = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Worker:
    """Drives a network on one device; `allstep.common.worker.Worker` says what each method does."""

    framework = "pytorch"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, strategy: Single,
                 device: torch.device, dataset: Dataset, slots: Sequence[str]) -> None:
        """`slots` are the canonical names of what the optimizer remembers of each weight."""
        self.collectives = strategy
        self._model, self._optimizer, self._device, self._slots = model, optimizer, device, slots
        mean, std = (torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)
                     for values in (dataset.mean, dataset.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std

    def train_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        images, labels = self._to_device(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss_sum = cross_entropy(self._model(images), labels, reduction="sum")
        (loss_sum * batch.loss_weight).backward()
        self._optimizer.step()
        return loss_sum.detach()

    def eval_step(self, batch: Batch) -> tuple[float, int]:
        images, labels = self._to_device(batch)
        self._model.eval()
        with torch.inference_mode():
            logits = self._model(images)
            loss_sum = cross_entropy(logits, labels, reduction="sum")
            num_correct = (logits.argmax(1) == labels).sum()
        self._model.train()
        return float(loss_sum), int(num_correct)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, parameter.detach().cpu().numpy()) for name, parameter in self._model.named_parameters())

    def export_weights(self) -> dict[str, np.ndarray]:
        return export_weights(self._model)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {f"model/{name}": tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            shapes |= {f"optimizer/{name}/{slot}": tuple(parameter.shape) for slot in self._slots}
        return shapes

    def export_state(self) -> dict[str, np.ndarray]:
        state = {f"model/{name}": array for name, array in self.export_weights().items()}
        for name, parameter in self._model.named_parameters():
            slots = self._optimizer.state[parameter]
            state |= {f"optimizer/{name}/{slot}": slots[_SLOT_NAMES[slot]].cpu().numpy() for slot in self._slots}
        return state

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        import_weights(self._model, {name.removeprefix("model/"): array for name, array in arrays.items()
                                     if name.startswith("model/")})
        for name, parameter in self._model.named_parameters():
            slots = {_SLOT_NAMES[slot]: torch.from_numpy(arrays[f"optimizer/{name}/{slot}"].copy()).to(self._device)
                     for slot in self._slots if f"optimizer/{name}/{slot}" in arrays}
            if slots:
                self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **slots}

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, **self.collectives.versions()}

    def peak_memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _to_device(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.from_numpy(batch.images).to(self._device).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        return images.mul_(self._scale).add_(self._shift), torch.from_numpy(batch.labels).to(self._device)
