"""The worker in TensorFlow: one step of training, one of evaluation, and access to the weights."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsFloat

import keras
import numpy as np

import tensorflow as tf
from allstep.common.datasets import Dataset
from allstep.common.loader import Batch
from allstep.tensorflow.models import CanonicalWeight, canonical_weights, export_weights
from allstep.tensorflow.resnet import counted
from allstep.tensorflow.strategies.single import Single, cut


class Worker:
    """Drives a network on one device; `allstep.common.worker.Worker` says what each method does."""

    framework = "tensorflow"

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        *,
        strategy: Single,
        device: str,
        dataset: Dataset,
        slots: Sequence[str],
        accumulate_steps: int = 1,
    ) -> None:
        """`slots` are the canonical names of what the optimizer remembers of each weight."""
        self.collectives, self._accumulate_steps = strategy, accumulate_steps
        self._model, self._optimizer, self._device, self._slots = model, optimizer, device, slots
        mean, std = np.array(dataset.mean, np.float32), np.array(dataset.std, np.float32)
        self._scale, self._shift = 1 / (255 * std), -mean / std
        images = tf.TensorSpec((None, *dataset.image_shape), tf.uint8)
        labels, number = tf.TensorSpec((None,), tf.int64), tf.TensorSpec((), tf.float32)
        # The number of samples is left open, so that a smaller last batch does not compile the step anew. AutoGraph
        # would rewrite Python's control flow, of which there is none on tensors, and takes longer than all the rest.
        self._train_step = tf.function(
            self._traced_train_step, input_signature=(images, labels, number, number), autograph=False
        )
        self._eval_step = tf.function(self._traced_eval_step, input_signature=(images, labels), autograph=False)

    def train_step(self, batch: Batch, learning_rate: float) -> SupportsFloat:
        loss_weight = batch.loss_weight * self.collectives.loss_scale
        return self.collectives.start(
            self._train_step, batch.images, batch.labels, np.float32(loss_weight), np.float32(learning_rate)
        )

    def eval_step(self, batch: Batch) -> tuple[float, int]:
        loss_sum, num_correct = self._eval_step(batch.images, batch.labels)
        return float(loss_sum), int(num_correct)

    def average_statistics(self) -> None:
        statistics = [weight.variable for weight in canonical_weights(self._model) if not weight.variable.trainable]
        copies = [self.collectives.copies(variable) for variable in statistics]
        if not statistics or len(copies[0]) * self.collectives.world_size == 1:
            return
        own = np.concatenate([np.mean([copy.numpy() for copy in of], axis=0, dtype=np.float64) for of in copies])
        mean = self.collectives.all_reduce_sum(own) / self.collectives.world_size
        ends = np.cumsum([variable.shape[0] for variable in statistics])
        for variable, values in zip(statistics, np.split(mean, ends[:-1]), strict=True):
            variable.assign(values.astype(np.float32))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return (
            (weight.name, copy.numpy())
            for weight in canonical_weights(self._model)
            if weight.variable.trainable
            for copy in self.collectives.copies(weight.variable)
        )

    def export_weights(self) -> dict[str, np.ndarray]:
        return export_weights(self._model)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: weight.canonical_shape for name, weight, _ in self._state()}

    def export_state(self) -> dict[str, np.ndarray]:
        return {name: weight.to_canonical(variable.value.numpy()) for name, weight, variable in self._state()}

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        for name, weight, variable in self._state():
            if name in arrays:
                variable.assign(weight.from_canonical(arrays[name]))
        self._optimizer.iterations.assign(step)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__, **self.collectives.versions()}

    def peak_memory_bytes(self) -> int:
        if "GPU" in self._device:
            return tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _traced_train_step(
        self, images: tf.Tensor, labels: tf.Tensor, loss_weight: tf.Tensor, learning_rate: tf.Tensor
    ) -> tf.Tensor:
        self._optimizer.learning_rate.assign(learning_rate)
        return self.collectives.train(self._train_on_device, images, labels, loss_weight)

    def _traced_eval_step(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.collectives.evaluate(self._evaluate_on_device, images, labels)

    def _train_on_device(
        self, images: tf.Tensor, labels: tf.Tensor, factor: float | tf.Tensor, loss_weight: tf.Tensor
    ) -> tf.Tensor:
        if self._accumulate_steps == 1:
            loss_sum, gradients = self._gradients(images, labels, factor, loss_weight)
        else:
            loss_sum, gradients = self._accumulated_gradients(images, labels, factor, loss_weight)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss_sum

    def _evaluate_on_device(
        self, images: tf.Tensor, labels: tf.Tensor, factor: float | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self._model(self._normalise(images), training=False)
        num_correct = tf.math.count_nonzero(tf.argmax(logits, 1) == labels)
        return _loss_sum(logits, labels) * factor, num_correct * tf.cast(factor, tf.int64)

    def _gradients(
        self, images: tf.Tensor, labels: tf.Tensor, factor: float | tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The sum of the samples' losses times `factor`, and the gradients of that sum times `loss_weight`."""
        with tf.GradientTape() as tape, counted(factor * tf.sign(loss_weight)):
            loss_sum = _loss_sum(self._model(self._normalise(images), training=True), labels) * factor
            loss = loss_sum * loss_weight
        # Keras 3 variables wrap TensorFlow's: the tape knows the latter alone.
        return loss_sum, tape.gradient(loss, [variable.value for variable in self._model.trainable_variables])

    def _accumulated_gradients(
        self, images: tf.Tensor, labels: tf.Tensor, factor: float | tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The same in passes over parts of the samples, one after the other: memory for one part is enough."""

        def add_pass(number: tf.Tensor, sums: tuple) -> tuple:
            *part, factor_of_part = cut(images, labels, number, self._accumulate_steps)
            of_part = self._gradients(*part, factor * factor_of_part, loss_weight)
            return number + 1, tf.nest.map_structure(tf.add, sums, of_part)

        zeros = tf.constant(0.0), [tf.zeros(variable.shape) for variable in self._model.trainable_variables]
        return tf.while_loop(
            lambda number, _: number < self._accumulate_steps, add_pass, (0, zeros), parallel_iterations=1
        )[1]

    def _state(self) -> Iterator[tuple[str, CanonicalWeight, keras.Variable]]:
        """Canonical name, layout and variable of each weight and each optimizer slot."""
        trainable = {variable.path: index for index, variable in enumerate(self._model.trainable_variables)}
        for weight in canonical_weights(self._model):
            yield f"model/{weight.name}", weight, weight.variable
            if weight.variable.trainable:
                index = trainable[weight.variable.path]
                for slot in self._slots:
                    yield f"optimizer/{weight.name}/{slot}", weight, self._optimizer.slots[slot][index]

    def _normalise(self, images: tf.Tensor) -> tf.Tensor:
        return tf.cast(images, tf.float32) * self._scale + self._shift


def _loss_sum(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.cast(logits, tf.float32))
    return tf.reduce_sum(losses)
