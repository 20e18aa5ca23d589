"""Values of a step that --trace digests: see `common/exact/trace.py`. `pytorch/step_trace.py` has the same."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.data.loader import Batch
from allstep.common.exact.replica_check import digest
from allstep.common.exact.trace import OpenRecorder
from allstep.common.training.worker import StepResult
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.observer import Observer
from allstep.tensorflow.passes import Gradients, OnePass
from allstep.tensorflow.strategies.ordered_sum import host_array
from allstep.tensorflow.strategies.strategy import Strategy


class StepTrace(Observer):
    """Records digests of the steps of a rank.

    These are digests of the gradients on this rank or of each slice, of their sums, of the weights after the step, and
    of the gradient at the output of each layer with weights, for one sample, a different one in each step. Values that
    exist only within the compiled step are assigned to variables there, which takes no copy.
    """

    sees_slices = True

    def __init__(
        self,
        model: keras.Model,
        weights: Sequence[CanonicalWeight],
        optimizer: keras.Optimizer,
        strategy: Strategy,
        open_recorder: OpenRecorder,
        *,
        one_pass: OnePass | None,
    ) -> None:
        """Prepare the trace; it must exist before the step is compiled.

        Args:
            weights: those with gradients, in their order in a slice's vector, after its loss.
            one_pass: the pass whose layers are traced; None if it runs on several devices, or recomputes activations.
        """
        self._optimizer = optimizer
        self._weights = [strategy.copies(weight.variable)[0] for weight in weights[::-1]]  # in backward's order
        shapes = [weight.variable.value.shape for weight in weights]
        self._bounds = list(pairwise(accumulate((shape.num_elements() for shape in shapes), initial=1)))[::-1]
        outputs = list(_outputs(model))[::-1] if one_pass and getattr(model, "inputs", None) else []
        if one_pass and outputs:
            with_outputs = keras.Model(model.inputs, [*(o for _, o in outputs), *model.outputs])

            def forward(inputs: tf.Tensor) -> tuple[Sequence[tf.Tensor], tf.Tensor]:
                *layers, outputs = with_outputs(inputs, training=True)
                return layers, outputs

            one_pass.forward, one_pass.see_layers = forward, self._keep_layers
        self._recorder = open_recorder([name for name, _ in outputs], [weight.name for weight in weights[::-1]])
        sizes = [math.prod(output.shape[1:]) for _, output in outputs]
        self._layer_bounds = list(pairwise(accumulate(sizes, initial=0)))
        self._layers = tf.Variable(tf.zeros(sum(sizes)), trainable=False)
        self._local: list[tf.Variable] = []
        self._reduced: list[tf.Variable] = []
        if not strategy.reduction.is_ordered:
            zeros = [tf.zeros(shape) for shape in shapes]
            self._local, self._reduced = ([tf.Variable(zero, trainable=False) for zero in zeros] for _ in range(2))
        self._row: np.ndarray | None = None
        self._knows_weights = False

    # Within the compiled step.

    def _keep_layers(self, gradients: Sequence[tf.Tensor]) -> None:
        """Keep the gradients of one sample at the outputs of layers."""
        step = tf.cast(cast("keras.Variable", self._optimizer.iterations).value, tf.int32) + 1
        samples = [gradient[tf.math.floormod(step, tf.shape(gradient)[0])] for gradient in gradients]
        self._layers.assign(tf.concat([tf.cast(tf.reshape(one, [-1]), tf.float32) for one in samples], 0))

    def see_local(self, gradients: Gradients) -> None:
        _keep(self._local, gradients)

    def see_averages(self, gradients: Gradients) -> None:
        _keep(self._reduced, gradients)

    # Around it.

    def begin(self, batch: Batch, learning_rate: float) -> None:
        self._row = self._recorder.begin(batch, learning_rate)
        if not self._knows_weights:  # later on they are those after the step before
            self._row["weights_before"] = [digest(_values(weight)) for weight in self._weights]
            self._knows_weights = True

    def see_slice(self, number: int, vector: tf.Tensor, *, has_samples: bool) -> None:
        assert self._row is not None
        self._row["local_gradients"][number] = self._digests_of(vector)
        if has_samples:
            self._see_layers(number)

    def see_sum(self, vector: tf.Tensor) -> None:
        assert self._row is not None
        self._row["reduced_gradients"] = self._digests_of(vector)

    def end(self, result: StepResult) -> None:
        assert self._row is not None
        if self._local:
            self._see_layers(0)
            self._row["local_gradients"][0] = [digest(_values(kept)) for kept in self._local[::-1]]
            if not int(result.overflow):
                self._row["reduced_gradients"] = [digest(_values(kept)) for kept in self._reduced[::-1]]
        self._row["weights_after"] = [digest(_values(weight)) for weight in self._weights]
        self._recorder.write(self._row)

    def close(self) -> None:
        """Do nothing: each step is written at its end."""

    def _see_layers(self, number: int) -> None:
        assert self._row is not None
        layers = _values(self._layers)
        self._row["activations"][number] = [digest(layers[begin:end]) for begin, end in self._layer_bounds]

    def _digests_of(self, vector: tf.Tensor) -> list[int]:
        array = host_array(vector)
        return [digest(array[begin:end]) for begin, end in self._bounds]


def _keep(variables: Sequence[tf.Variable], gradients: Gradients) -> None:
    if variables:  # there are none with --slices
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(tf.zeros_like(variable) if gradient is None else gradient)


def _values(variable: tf.Variable) -> np.ndarray:
    # The bare operation takes half as long as `value()`, which matters some dozen times per step.
    return host_array(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def _outputs(model: keras.Model) -> Iterator[tuple[str, keras.KerasTensor]]:
    """Yield name and output of each layer that has weights and is called once, in the order of the forward pass."""
    for layer in model.layers:
        if not layer.trainable_weights or len(layer._inbound_nodes) != 1:
            continue
        output = layer.output
        if isinstance(output, keras.KerasTensor) and output.shape[0] is None and None not in output.shape[1:]:
            yield layer.name, output
