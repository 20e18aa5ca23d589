"""The worker in TensorFlow: a facade over inputs, the training step, validation and the state."""

import contextlib
import resource

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import are_of_scores, default_loss
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.exact.trace import OpenRecorder
from allstep.common.recipe.noise_scale import parts_of
from allstep.common.training import worker
from allstep.tensorflow.building import build_step
from allstep.tensorflow.inputs import Inputs
from allstep.tensorflow.losses import build_loss, scores
from allstep.tensorflow.passes import losses_of_layers
from allstep.tensorflow.state import State, trained_weights
from allstep.tensorflow.step_trace import StepTrace
from allstep.tensorflow.strategies.distribute import DistributedStrategy
from allstep.tensorflow.strategies.strategy import Strategy


class Worker(worker.Worker):
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
        """Build the step, the state and validation.

        `measures_noise` tells whether to measure the gradients of passes for the noise scale.
        """
        self.device, self.collectives, self._strategy, self._model = device, strategy.collectives, strategy, model
        sizes = self.collectives.world_size, strategy.num_local_devices, config.parallel.accumulate_steps
        self.num_parts = parts_of(*sizes, measures=measures_noise)
        self._inputs = Inputs(dataset)
        self._step, self._one_pass = build_step(
            model, optimizer, config, strategy, self._inputs, dataset=dataset, measures_noise=bool(self.num_parts)
        )
        self._state = State(model, config.optimizer, self._step, strategy)
        self._of_scores = are_of_scores(config, dataset)
        self._loss = build_loss(config.loss or default_loss(dataset.task))
        self._eval_step = strategy.compile_eval_step(self._evaluate_on_device, self._inputs.in_validation)

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        on_one_device = not isinstance(self._strategy, DistributedStrategy)
        if not (self._strategy.reduction.is_ordered or on_one_device):
            raise UserError(
                "expected --slices with --trace in strategies of tf.distribute, whose replicas add up gradients by "
                "themselves, received none; give --slices V"
            )
        one_pass = self._one_pass if on_one_device and not self._strategy.flags.recompute else None
        parts = self._model, trained_weights(self._model), self._step.optimizer, self._strategy
        trace = StepTrace(*parts, open_recorder, one_pass=one_pass)
        self._step.observers.append(trace)
        return trace

    def eval_step(self, batch: Batch) -> tuple[float, np.ndarray]:
        loss_sum, outputs = self._eval_step(batch.inputs, batch.targets)
        return float(loss_sum), outputs.numpy()

    def evaluating(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__, **self._strategy.versions()}

    def peak_memory_bytes(self) -> int:
        if "GPU" in self.device:
            return tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _evaluate_on_device(
        self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = self._model(self._inputs(inputs), training=False)
        loss_sum = self._loss(outputs, targets) + losses_of_layers(self._model, targets)
        outputs = scores(outputs, targets) if self._of_scores else outputs
        num_samples = tf.where(loss_weight > 0, tf.shape(outputs)[0], 0)
        return loss_sum * loss_weight, tf.cast(outputs, tf.float32)[:num_samples]
