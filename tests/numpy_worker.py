"""Worker in NumPy: a softmax regression with real gradients, by which the loop of both frameworks is tested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.recipe.noise_scale import parts_of
from allstep.common.recipe.weights import initial_weights
from allstep.common.training.worker import StepResult


class NumpyWorker:
    """Implements `allstep.common.training.worker.Worker` for SGD with momentum; weights are float32 arrays.

    Slices of --slices are summed in their order, in float64, so their sums are the same on any number of ranks.
    """

    framework = "pytorch"  # checkpoints know two frameworks, and the layout is PyTorch's
    device = "cpu"

    def __init__(self, config: TrainConfig, dataset: Dataset, collectives: Collectives) -> None:
        shapes = {
            "fc.weight": (dataset.num_classes, int(np.prod(dataset.input_shape))),
            "fc.bias": (dataset.num_classes,),
        }
        self.weights = initial_weights(shapes, config.data.seed)
        self.slots = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.ema = {name: array.copy() for name, array in self.weights.items()}
        self.collectives, self._config, self._dataset = collectives, config, dataset
        measures = config.precision != "fp16" and not config.parallel.slices
        self.num_parts = parts_of(collectives.world_size, measures=measures)
        self.num_steps = 0
        self.compiled: list[int] = []
        """Sizes of the global batches for which the step was compiled."""

    def compile(self, batch: Batch) -> None:
        self.collectives.barrier()
        self.compiled.append(batch.num_global)

    def trace(self, open_recorder: object) -> None:
        raise NotImplementedError("a NumPy worker has no layers to trace")

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        rows, width = self._config.parallel.num_slices or 1, sum(array.size for array in self.weights.values())
        sums = np.zeros((rows, 1 + width))
        for row, part in [(one.number, batch.part(one)) for one in batch.slices] or [(0, batch)]:
            loss, gradient = self._loss_and_gradient(part)
            if part.num_samples:
                sums[row] = loss, *(gradient * part.loss_weight)
        local_loss, local_gradient = sums[:, 0].sum(), sums[0, 1:]
        with np.errstate(over="ignore", invalid="ignore"):
            if self._config.precision == "fp16":
                sums[:, 1:] = (sums[:, 1:] * loss_scale).astype(np.float16)
            total = self.collectives.all_reduce_sum(sums.ravel()).reshape(sums.shape).sum(axis=0)
            mean = total[1:] / (loss_scale * (1 if batch.slices else self.collectives.world_size))
        if batch.slices:
            local_loss = total[0] if self.collectives.rank == 0 else 0.0
        overflows = not np.isfinite(mean).all() and self._config.precision == "fp16"
        if not overflows:
            self._apply(mean, learning_rate)
        # `loss_weight` is the number of ranks divided by that of samples in the global batch.
        part_mean = (
            local_gradient / (batch.loss_weight * batch.num_samples) if batch.num_samples else 0 * local_gradient
        )
        return StepResult(local_loss, int(overflows), float(part_mean @ part_mean), float(mean @ mean))

    def _loss_and_gradient(self, batch: Batch) -> tuple[float, np.ndarray]:
        """Return the sum of the losses and its gradient."""
        inputs, odds = self._inputs(batch), self._odds(batch)
        weights = np.array(self._dataset.class_weights or np.ones(odds.shape[1]))[batch.targets]
        loss = -(weights * np.log(odds[np.arange(len(odds)), batch.targets])).sum()
        error = weights[:, None] * (odds - np.eye(odds.shape[1])[batch.targets])
        return float(loss), np.concatenate([(error.T @ inputs).ravel(), error.sum(axis=0)])

    def _inputs(self, batch: Batch) -> np.ndarray:
        unit = 255 if batch.inputs.dtype == np.uint8 else 1
        scaled = (batch.inputs / unit - np.array(self._dataset.mean)) / np.array(self._dataset.std)
        return scaled.reshape(len(batch.inputs), -1)

    def _odds(self, batch: Batch) -> np.ndarray:
        logits = self._inputs(batch) @ self.weights["fc.weight"].T.astype(float) + self.weights["fc.bias"]
        logits -= logits.max(axis=1, keepdims=True)
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    def _apply(self, gradient: np.ndarray, learning_rate: float) -> None:
        begin, self.num_steps = 0, self.num_steps + 1
        for name, array in self.weights.items():
            part = gradient[begin : begin + array.size].reshape(array.shape).astype(np.float32)
            begin += array.size
            self.slots[name][...] = np.float32(self._config.optimizer.momentum) * self.slots[name] + part
            array -= np.float32(learning_rate) * self.slots[name]
            decay = np.float32(self._config.optimizer.ema or 0.0)
            self.ema[name] = decay * self.ema[name] + (1 - decay) * array if self.num_steps > 1 else array.copy()

    def eval_step(self, batch: Batch) -> tuple[float, np.ndarray]:
        odds = self._odds(batch)
        with np.errstate(divide="ignore"):
            return float(-np.log(odds[np.arange(len(odds)), batch.targets]).sum()), np.log(odds).astype(np.float32)

    def evaluating(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.weights, weights = self.ema, self.weights
        yield
        self.weights = weights

    def average_statistics(self) -> None:
        pass

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(self.weights.items())

    def export_weights(self) -> dict[str, np.ndarray]:
        return dict(self.weights)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.export_state().items()}

    def export_state(self) -> dict[str, np.ndarray]:
        state = {f"model/{name}": array for name, array in self.weights.items()}
        state |= {f"optimizer/{name}/momentum": array for name, array in self.slots.items()}
        averages = self.ema if self._config.optimizer.ema is not None else {}
        return state | {f"ema/{name}": array for name, array in averages.items()}

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        self.num_steps = step
        for name in self.weights:
            self.weights[name] = arrays[f"model/{name}"].copy()
            self.slots[name] = arrays.get(f"optimizer/{name}/momentum", self.slots[name]).copy()
            self.ema[name] = arrays.get(f"ema/{name}", self.ema[name]).copy()

    def pending_tensors(self) -> Sequence[str]:
        return ()

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def peak_memory_bytes(self) -> int:
        return 2**20
