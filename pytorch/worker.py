"""The worker in PyTorch: one step of training, one of evaluation, and access to the weights."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import SupportsFloat

import numpy as np
import torch

from allstep.common.catalog.losses import default_loss, metric_of
from allstep.common.config.train_config import LAYER_SLOTS, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import rank_slice
from allstep.common.exact.trace import OpenRecorder
from allstep.common.recipe.noise_scale import is_measured, parts_of
from allstep.common.recipe.weights import step_seed
from allstep.common.training.worker import StepResult
from allstep.pytorch.averaging import WeightAverage
from allstep.pytorch.gradients import GradientChanges
from allstep.pytorch.jpeg_decoding import JpegDecoder
from allstep.pytorch.losses import build_loss, build_metric
from allstep.pytorch.models import named_weights
from allstep.pytorch.noise_scale import GradientSquares
from allstep.pytorch.sliced_step import SlicedStep
from allstep.pytorch.step_trace import StepTrace
from allstep.pytorch.strategies.batch_norm import uncounted
from allstep.pytorch.strategies.strategy import EvalStep, Strategy, TrainStep

_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# PyTorch's names of optimizer slots, where they are not the canonical ones.
_SLOT_NAMES = {"momentum": "momentum_buffer", "sum_of_squares": "sum"}


class Worker:
    """Drives a network on one device; `allstep.common.training.worker.Worker` says what each method does."""

    framework = "pytorch"

    def __init__(
        self,
        network: torch.nn.Module,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        strategy: Strategy,
        device: torch.device,
        dataset: Dataset,
        *,
        measures_noise: bool = False,
    ) -> None:
        """Prepare the steps.

        Args:
            network: has the weights, by their canonical names; those that another rank keeps are on the device meta.
            model: what a training step calls: `network` as the strategy wrapped it.
            measures_noise: whether to look at the gradients of parts of a batch for the noise scale.
        """
        flags, seed, accumulate_steps = config.optimizer, config.data.seed, config.parallel.accumulate_steps
        self.collectives, self._strategy = strategy.collectives, strategy
        self._network, self._model, self._optimizer = network, model, optimizer
        loss = config.loss or default_loss(dataset.task)
        self._train_step = strategy.compile_train_step(TrainStep(model, build_loss(loss, flags.label_smoothing)))
        metric = build_metric(metric_of(dataset.task, loss), loss)
        self._eval_step = strategy.compile_eval_step(EvalStep(model, build_loss(loss), metric))
        self.device, self._slots, self._num_passes = device, flags.slots, accumulate_steps
        self.num_parts = parts_of(self.collectives.world_size, accumulate_steps, measures=measures_noise)
        self._squares = GradientSquares(network.parameters()) if self.num_parts else None
        self._sliced_step = SlicedStep(network, strategy) if strategy.flags.slices else None
        changes_gradients = flags.clip_norm is not None or flags.gradient_noise
        self._gradient_changes = GradientChanges(flags, seed, strategy) if changes_gradients else None
        self._num_steps, self._seed = 0, seed
        self._trace: StepTrace | None = None
        self._average = None if flags.ema is None else WeightAverage(dict(self._local_parameters()), flags.ema)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decode = None
        if dataset.encoded:
            self._decode = JpegDecoder(dataset.input_shape[0], device, tells=self.collectives.rank == 0)
        autocast_type = _AUTOCAST_TYPES.get(config.precision)
        self._autocast = partial(torch.autocast, device.type, autocast_type) if autocast_type else nullcontext
        self._scales_loss = config.precision == "fp16"
        # Validation is not compiled: it has too few passes to make up for the time.
        self._eager = partial(torch.compiler.set_stance, "force_eager") if strategy.flags.compile else nullcontext
        self._input_type, self._has_images = dataset.input_type, len(dataset.input_shape) == 3
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, *((1, 1) if self._has_images else ()))
            for values in (dataset.mean, dataset.std)
        )
        largest = 255 if dataset.input_type == "uint8" else 1
        self._scale, self._shift = 1 / (largest * std), -mean / std

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        self._trace = StepTrace(self._network, open_recorder, sliced=self._sliced_step is not None)
        if self._sliced_step:
            self._sliced_step.trace = self._trace
        return self._trace

    def compile(self, batch: Batch) -> None:
        weights = [(tensor, tensor.clone()) for _, tensor in self._local_weights()]
        slots = {parameter: copy.deepcopy(own) for parameter, own in self._optimizer.state.items()}
        num_steps = self._num_steps
        averages = copy.deepcopy(self._average.averages) if self._average else {}
        float(self.train_step(batch, 0.0))
        self._num_steps = num_steps
        if self._average:
            self._average.averages = averages
        for tensor, before in weights:
            tensor.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(slots)

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        if self._trace:
            self._trace.begin_step(batch, learning_rate)
        if self._squares:
            self._squares.begin_step(measures=is_measured(self._num_steps + 1))
        if self._sliced_step:
            loss_sum = self._sliced_step(batch, partial(self._slice, loss_scale=loss_scale))
            # All ranks have the same sum, which counts once.
            loss_sums = [loss_sum] if self.collectives.rank == 0 else []
        else:
            loss_sums = self._passes(batch, loss_scale)
        overflowed = False
        if self._scales_loss:
            overflowed = self._strategy.apply_unscaled(self._optimizer, loss_scale, self._apply)
        else:
            self._apply()
        if self._trace:
            self._trace.end_step()
        loss_sum = sum(loss_sums[1:], loss_sums[0]) if loss_sums else torch.zeros(())
        numbers = (self._squares.sum_over_parts, self._squares.average) if self._squares else ()
        return StepResult(_read_later(loss_sum), overflowed, *map(_read_later, numbers))

    def _passes(self, batch: Batch, loss_scale: float) -> list[torch.Tensor]:
        """Accumulate gradients over the passes of a step, which leaves the averaged ones in the parameters.

        Returns: the sums of the losses of the passes that have samples.
        """
        loss_sums = []
        for number in range(self._num_passes):
            begin, end = rank_slice(0, len(batch.inputs), rank=number, world_size=self._num_passes)
            # All ranks need the same number of passes, so one without samples runs on a sample of weight 0.
            inputs, targets = self._to_device(batch, begin, max(end, begin + 1))
            loss_weight = batch.loss_weight * loss_scale if end > begin else 0.0
            statistics = nullcontext() if loss_weight else uncounted(self._network)
            seen = self._squares.see_part(loss_weight * (end - begin)) if self._squares else nullcontext()
            with self._autocast(), statistics, seen:
                loss_sum = self._train_step(inputs, targets, loss_weight, is_last=number == self._num_passes - 1)
            if loss_weight:
                loss_sums.append(loss_sum)
        return loss_sums

    def _slice(self, part: Batch, number: int, *, loss_scale: float) -> torch.Tensor:
        """Add the gradients of a slice to those of the parameters; returns the sum of its losses."""
        # Dropout draws the same numbers for a slice on whichever rank.
        _seed_generators(step_seed(self._seed, self._num_steps, number), self.device)
        inputs, targets = self._to_device(part)
        if self._trace:
            self._trace.part = number
        with self._autocast():
            return self._train_step(inputs, targets, part.loss_weight * loss_scale, is_last=True)

    def _apply(self) -> None:
        """Take the optimizer's step by the averaged gradients."""
        if self._trace:
            self._trace.see_average()
        if self._squares:
            self._squares.see_average()
        if self._gradient_changes:
            self._gradient_changes.apply(dict(self._local_parameters()), self._num_steps)
        self._optimizer.step()
        self._num_steps += 1
        if self._average:
            self._average.update()

    def eval_step(self, batch: Batch) -> tuple[float, float]:
        inputs, targets = self._to_device(batch)
        self._model.eval()
        with torch.no_grad(), self._autocast(), self._eager():
            score = self._eval_step(inputs, targets)
        self._model.train()
        return score

    def evaluating(self) -> AbstractContextManager:
        return self._strategy.whole_weights()

    def averaged_weights(self) -> AbstractContextManager:
        return self._average.in_use() if self._average else nullcontext()

    def average_statistics(self) -> None:
        statistics = [buffer for buffer in self._network.buffers() if buffer.is_floating_point()]
        if not statistics or self.collectives.world_size == 1:
            return
        own = torch.cat([buffer.flatten() for buffer in statistics]).double().cpu().numpy()
        mean = torch.from_numpy(self.collectives.all_reduce_sum(own) / self.collectives.world_size)
        for buffer, values in zip(statistics, mean.split([buffer.numel() for buffer in statistics]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return (
            (name, array)
            for name, parameter in self._local_parameters()
            for array in self._strategy.replicas(parameter)
        )

    def export_weights(self) -> dict[str, np.ndarray]:
        return self._strategy.gather(dict(self._local_weights()))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {f"model/{name}": tuple(tensor.shape) for name, tensor in named_weights(self._network)}
        for name, parameter in self._network.named_parameters():
            for slot in self._slots:
                shapes[f"optimizer/{name}/{slot}"] = () if slot in LAYER_SLOTS else tuple(parameter.shape)
            if self._average:
                shapes[f"ema/{name}"] = tuple(parameter.shape)
        return shapes

    def export_state(self) -> dict[str, np.ndarray]:
        state = {f"model/{name}": tensor for name, tensor in self._local_weights()}
        for name, parameter in self._local_parameters():
            slots = self._optimizer.state[parameter]
            for slot in self._slots:
                # PyTorch makes them in the first step, which fp16 may skip.
                zeros = torch.zeros(()) if slot in LAYER_SLOTS else torch.zeros_like(parameter.detach())
                state[f"optimizer/{name}/{slot}"] = slots[_SLOT_NAMES.get(slot, slot)] if slots else zeros
        if self._average:
            state |= {f"ema/{name}": average for name, average in self._average.averages.items()}
        return self._strategy.gather(state)

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        self._num_steps = step
        with torch.no_grad():
            for name, tensor in self._local_weights():
                tensor.copy_(self._strategy.shard(arrays[f"model/{name}"], tensor))
        # PyTorch's other optimizers read it on the host, and would wait for the GPU in each step.
        group = self._optimizer.param_groups[0]
        step_device = self.device if group.get("fused") or group.get("capturable") else None
        for name, parameter in self._local_parameters():
            # A slot of one number is whole on every rank that has a part of its weight.
            scalar = torch.empty((), device=parameter.device)
            slots = {
                _SLOT_NAMES.get(slot, slot): self._strategy.shard(
                    arrays[f"optimizer/{name}/{slot}"], scalar if slot in LAYER_SLOTS else parameter.detach()
                )
                for slot in self._slots
                if f"optimizer/{name}/{slot}" in arrays
            }
            if slots:
                self._optimizer.state[parameter] = {"step": torch.tensor(float(step), device=step_device), **slots}
            if self._average and f"ema/{name}" in arrays:
                self._average.averages[name] = self._strategy.shard(arrays[f"ema/{name}"], parameter.detach())

    def _local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in named_weights(self._network) if not tensor.is_meta)

    def _local_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, tensor) for name, tensor in self._network.named_parameters() if not tensor.is_meta)

    def pending_tensors(self) -> Sequence[str]:
        return self._strategy.pending_tensors()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, **self._strategy.versions()}

    def peak_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _to_device(self, batch: Batch, begin: int = 0, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, scaled unless they are tokens, and targets of the samples [begin, end) of `batch`."""
        inputs, targets = batch.inputs[begin:end], self._copy(torch.as_tensor(batch.targets[begin:end]))
        inputs = self._decode(inputs) if self._decode else self._copy(torch.as_tensor(inputs))
        if self._input_type == "int64":
            return inputs, targets
        inputs = inputs.to(torch.float32, copy=True)  # on a CPU they are the data set's own
        if self._has_images:
            # Channels stay last in memory, as they are read: convolutions follow that, and are faster for it.
            inputs = inputs.permute(0, 3, 1, 2)
        return inputs.mul_(self._scale).add_(self._shift), targets

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this rank's device; a GPU copies it while it still computes the step before."""
        if self._copy_stream is None or tensor.is_cuda:  # a benchmark's samples may be there already
            return tensor.to(self.device)
        with torch.cuda.stream(self._copy_stream):
            copy = tensor.pin_memory().to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._copy_stream)
        copy.record_stream(computing)
        return copy


def _seed_generators(seed: int, device: torch.device) -> None:
    """What torch.manual_seed does, which in a process without a GPU formats its stack each time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _read_later(number: torch.Tensor | float) -> SupportsFloat:
    """`number`, which is read once a GPU has computed it."""
    return _PendingNumber(number) if isinstance(number, torch.Tensor) and number.is_cuda else number


class _PendingNumber:
    """A number that a GPU is computing; `float()` waits for it alone, not for steps that were started since."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._number)
