"""The worker in TensorFlow: one step of training, one of evaluation, and access to the weights."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import default_loss, metric_of
from allstep.common.config.train_config import LAYER_SLOTS, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.exact.trace import OpenRecorder
from allstep.common.recipe.noise_scale import parts_of
from allstep.common.training.worker import StepResult
from allstep.tensorflow.averaging import WeightAverage
from allstep.tensorflow.gradients import GradientChanges
from allstep.tensorflow.losses import build_loss, build_metric
from allstep.tensorflow.models import CanonicalWeight, canonical_weights, export_weights
from allstep.tensorflow.networks.batch_norm import counted
from allstep.tensorflow.noise_scale import GradientSquares
from allstep.tensorflow.optimizers.base import Optimizer
from allstep.tensorflow.recompute import RecomputedBlocks
from allstep.tensorflow.sliced_step import SlicedStep
from allstep.tensorflow.step_trace import StepTrace
from allstep.tensorflow.strategies.distribute import DistributedStrategy
from allstep.tensorflow.strategies.strategy import Strategy, cut


class Worker:
    """Drives a network on one device; `allstep.common.training.worker.Worker` says what each method does."""

    framework = "tensorflow"

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        config: TrainConfig,
        strategy: Strategy,
        device: str,
        dataset: Dataset,
        *,
        measures_noise: bool = False,
    ) -> None:
        """Prepare the steps.

        Args:
            measures_noise: whether to look at the gradients of parts of a batch for the noise scale.
        """
        flags, accumulate_steps = config.optimizer, config.parallel.accumulate_steps
        self.collectives, self._strategy = strategy.collectives, strategy
        self._model, self._optimizer, self.device, self._slots = model, optimizer, device, flags.slots
        if flags.clip_norm is not None or flags.gradient_noise:
            optimizer.changes = GradientChanges(flags, config.data.seed, _in_order(model))
        num_devices = strategy.num_local_devices
        self.num_parts = parts_of(self.collectives.world_size, num_devices, accumulate_steps, measures=measures_noise)
        self._squares = GradientSquares(optimizer, num_devices) if self.num_parts else None
        self._average = None
        if flags.ema is not None:
            self._average = WeightAverage(model.trainable_variables, optimizer.averages, strategy)
        # Of Keras' batch norms, which would count the sample of weight 0 that stands in an empty slice.
        self._moving_averages = [v for v in model.non_trainable_variables if "moving_" in v.path]
        loss = config.loss or default_loss(dataset.task)
        self._train_loss, self._loss = build_loss(loss, flags.label_smoothing), build_loss(loss)
        self._metric = build_metric(metric_of(dataset.task, loss), loss)
        self._num_passes, self._scales_loss = accumulate_steps, config.precision == "fp16"
        mean, std = np.array(dataset.mean, np.float32), np.array(dataset.std, np.float32)
        largest = 255 if dataset.input_type == "uint8" else 1
        self._scale, self._shift = 1 / (largest * std), -mean / std
        inputs = tf.TensorSpec((None, *dataset.input_shape), dataset.input_type)
        targets = tf.TensorSpec((None, *dataset.target_shape), dataset.target_type)
        shares = tf.TensorSpec((None, dataset.num_classes), "float32")
        samples = inputs, shares if dataset.mixes_targets else targets
        self._forward = RecomputedBlocks(model) if strategy.flags.recompute else model
        self._one_pass = strategy.compiled(self._gradients)
        self._train_step = strategy.compile_train_step(self._train_on_device, self._set_learning_rate, samples)
        self._sliced_step, self._trace = None, None
        if strategy.flags.slices:
            self._sliced_step = SlicedStep(
                model,
                strategy,
                gradients=self._gradients,
                apply=self._apply,
                set_learning_rate=self._set_learning_rate,
                samples=samples,
            )
        self._eval_step = strategy.compile_eval_step(self._evaluate_on_device, (inputs, targets))

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        on_one_device = not isinstance(self._strategy, DistributedStrategy)
        if not (self._sliced_step or on_one_device):
            raise UserError(
                "expected --slices with --trace in strategies of tf.distribute, whose replicas add up gradients by "
                "themselves, received none; give --slices V"
            )
        if not (self._sliced_step or isinstance(self._optimizer, Optimizer)):
            raise UserError(
                f"expected an optimizer of the suite with --trace, received {type(self._optimizer).__name__}, which "
                "shows its averaged gradients to nobody; take one of --optimizer, or give --slices V"
            )
        self._trace = StepTrace(
            self._model,
            _in_order(self._model),
            self._optimizer,
            self._strategy,
            open_recorder,
            looks_into_passes=on_one_device and not self._strategy.flags.recompute,
            sliced=self._sliced_step is not None,
        )
        if self._sliced_step:
            self._sliced_step.trace = self._trace
        return self._trace

    def compile(self, batch: Batch) -> None:
        state = [
            copy for v in (*self._model.variables, *self._optimizer.variables) for copy in self._strategy.copies(v)
        ]
        before = [tf.identity(variable) for variable in state]
        float(self.train_step(batch, 0.0))
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        if self._trace:
            self._trace.begin_step(batch, learning_rate)
        if self._sliced_step:
            result = self._sliced_step(batch, learning_rate, loss_scale)
        else:
            result = self._train_step(batch.inputs, batch.targets, batch.loss_weight, learning_rate, loss_scale)
        if self._trace:
            self._trace.end_step(overflowed=bool(int(result.overflow)))
        return result

    def eval_step(self, batch: Batch) -> tuple[float, float]:
        loss_sum, metric_sum = self._eval_step(batch.inputs, batch.targets)
        return float(loss_sum), float(metric_sum)

    def evaluating(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def averaged_weights(self) -> contextlib.AbstractContextManager:
        return self._average.in_use() if self._average else contextlib.nullcontext()

    def average_statistics(self) -> None:
        statistics = [weight.variable for weight in canonical_weights(self._model) if not weight.variable.trainable]
        replicas = [self._strategy.replicas(variable) for variable in statistics]
        if not statistics or len(replicas[0]) * self.collectives.world_size == 1:
            return
        own = np.concatenate([np.mean(arrays, axis=0, dtype=np.float64).ravel() for arrays in replicas])
        mean = self.collectives.all_reduce_sum(own) / self.collectives.world_size
        ends = np.cumsum([variable.value.shape.num_elements() for variable in statistics])
        for variable, values in zip(statistics, np.split(mean, ends[:-1]), strict=True):
            variable.assign(values.astype(np.float32).reshape(variable.shape))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return (
            (weight.name, array)
            for weight in canonical_weights(self._model)
            if weight.variable.trainable
            for array in self._strategy.replicas(weight.variable)
        )

    def export_weights(self) -> dict[str, np.ndarray]:
        return export_weights(self._model)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: weight.canonical_shape for name, weight, _ in self._state()}

    def export_state(self) -> dict[str, np.ndarray]:
        arrays = self._strategy.gather({name: variable for name, _, variable in self._state()})
        return {name: weight.to_canonical(arrays[name]) for name, weight, _ in self._state()}

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        for name, weight, variable in self._state():
            if name in arrays:
                variable.assign(self._strategy.shard(weight.from_canonical(arrays[name]), variable))
        cast("keras.Variable", self._optimizer.iterations).assign(step)

    def pending_tensors(self) -> Sequence[str]:
        return self._strategy.pending_tensors()

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__, **self._strategy.versions()}

    def peak_memory_bytes(self) -> int:
        if "GPU" in self.device:
            return tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _set_learning_rate(self, learning_rate: tf.Tensor) -> None:
        cast("keras.Variable", self._optimizer.learning_rate).assign(learning_rate)

    def _train_on_device(
        self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, loss_scale: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        compute = self._pass if self._num_passes == 1 else self._accumulated_gradients
        loss_sum, gradients, *squares = compute(inputs, targets, loss_weight * loss_scale)
        if self._trace:
            self._trace.keep_local(gradients)
        overflow = self._apply(gradients, loss_scale)
        return loss_sum, overflow, *squares, *([self._squares.average] if self._squares else [])

    def _apply(self, gradients: list[tf.Tensor], loss_scale: tf.Tensor) -> tf.Tensor:
        """Take the optimizer's step; returns a number above 0 where gradients overflowed and nothing was changed."""
        variables = self._model.trainable_variables
        if self._scales_loss:
            return self._strategy.apply_unscaled(self._optimizer, gradients, variables, loss_scale)
        self._optimizer.apply(gradients, variables)
        return tf.constant(0)

    def _evaluate_on_device(
        self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = self._model(self._scaled(inputs), training=False)
        return self._loss(outputs, targets) * loss_weight, self._metric(outputs, targets) * loss_weight

    def _gradients(
        self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The sum of the samples' losses, and the gradients of that sum times `loss_weight`; 0 where that is 0."""
        counts = tf.sign(loss_weight)
        before = [tf.identity(variable.value) for variable in self._moving_averages]
        traced = self._trace.with_outputs if self._trace else None
        layers: list[tf.Tensor] = []
        with tf.GradientTape() as tape, counted(counts):
            outputs = (traced or self._forward)(self._scaled(inputs), training=True)
            if traced:
                *layers, outputs = outputs
            loss_sum = self._train_loss(outputs, targets) * counts
            loss = loss_sum * loss_weight
        for variable, value in zip(self._moving_averages, before, strict=True):
            variable.assign(tf.where(counts > 0, variable.value, value))
        # Keras 3 variables wrap TensorFlow's: the tape knows the latter alone.
        weights = [variable.value for variable in self._model.trainable_variables]
        found = tape.gradient(loss, [*weights, *layers], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradient of an embedding is sparse (IndexedSlices): few rows on each rank, many over all.
        gradients = [tf.convert_to_tensor(gradient) for gradient in found]
        if self._trace and layers:
            self._trace.keep_layers(gradients[len(weights) :])
        return loss_sum, gradients[: len(weights)]

    def _pass(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor) -> tuple:
        """Like `_gradients`; with a third result, the square for the noise scale, where that is measured."""
        loss_sum, gradients = self._one_pass(inputs, targets, loss_weight)
        factor = loss_weight * tf.cast(tf.shape(targets)[0], tf.float32)
        return loss_sum, gradients, *([self._squares.see_part(gradients, factor)] if self._squares else [])

    def _accumulated_gradients(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor) -> tuple:
        """Like `_pass`, over parts of the samples one after the other, so that memory for one part is enough."""

        def add_pass(number: tf.Tensor, sums: tuple) -> tuple:
            results = self._pass(*cut(inputs, targets, loss_weight, number, self._num_passes))
            return number + 1, tf.nest.map_structure(tf.add, sums, results)

        zeros = tf.constant(0.0), [tf.zeros(variable.shape) for variable in self._model.trainable_variables]
        zeros = (*zeros, *([tf.constant(0.0)] if self._squares else []))
        _, sums = tf.while_loop(
            lambda number, _: number < self._num_passes, add_pass, (0, zeros), parallel_iterations=1
        )
        return sums

    def _state(self) -> Iterator[tuple[str, CanonicalWeight, keras.Variable]]:
        """Canonical name, layout and variable of each weight and each optimizer slot."""
        trainable = {variable.path: index for index, variable in enumerate(self._model.trainable_variables)}
        for weight in canonical_weights(self._model):
            yield f"model/{weight.name}", weight, weight.variable
            if weight.variable.trainable:
                index = trainable[weight.variable.path]
                for slot in self._slots:
                    variable = self._optimizer.slots[slot][index]
                    layout = CanonicalWeight(weight.name, variable, (), ()) if slot in LAYER_SLOTS else weight
                    yield f"optimizer/{weight.name}/{slot}", layout, variable
                if self._average:
                    yield f"ema/{weight.name}", weight, self._average.averages[index]

    def _scaled(self, inputs: tf.Tensor) -> tf.Tensor:
        """Inputs normalised by the data set's mean and deviation; tokens stay as they are."""
        return inputs if inputs.dtype == tf.int64 else tf.cast(inputs, tf.float32) * self._scale + self._shift


def _in_order(model: keras.Model) -> list[CanonicalWeight]:
    """The weights that have gradients, in the model's order."""
    by_path = {weight.variable.path: weight for weight in canonical_weights(model)}
    return [by_path[variable.path] for variable in model.trainable_variables]
