"""Keras models, optimizers and losses that a Session refuses, or of which it tells. Oracle: the lines promised."""

from __future__ import annotations

from functools import partial

import keras
import pytest
import tensorflow as tf
from keras import layers
from stranger_keras_networks import (
    IMAGES,
    LABELS,
    RATE,
    SERIES,
    VECTORS,
    WORDS,
    AddsAtLeast,
    AddsSum,
    Centred,
    Codebook,
    Counts,
    Custom,
    DrawsByTensorFlow,
    Experts,
    Forgetful,
    RunningLoss,
    SetsFromFirstSamples,
    SignsGradients,
    centred_by_operations,
    float8,
    frozen,
    in_layers_of,
    stacked,
    trained,
    with_centred_gradient,
    with_clipped_gradient,
)

from allstep.common.base.errors import UserError
from allstep.tensorflow.session import Session


class OwnStep(Custom):
    def train_step(self, data):
        raise AssertionError("never called")


class OwnLoss(Custom):
    def compute_loss(self, *args, **options):
        return 2 * super().compute_loss(*args, **options)


class OtherOutputsInTraining(Custom):
    def call(self, inputs, training=False):
        outputs = super().call(inputs)
        return (outputs, outputs) if training else outputs


class Stateful(Custom):
    def __init__(self):
        super().__init__()
        self.hidden = layers.LSTM(4, stateful=True)


class MakesLayers(Custom):
    def call(self, inputs):
        return super().call(layers.Dense(4)(inputs))


def ended(end):
    inputs = layers.Input((5,))
    return keras.Model(inputs, end(layers.Dense(3)(inputs)))


def under_policy(policy):
    keras.config.set_dtype_policy(policy)
    return Custom()


def under_strategy():
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        return ended(layers.Dense(3))


COUPLED = "computes outputs of a sample from other samples of its batch"
PASSES = {"accumulate_steps": 2}
REFUSED = {
    "own train_step": (OwnStep, {}, "with the train_step of Keras from --model .* received OwnStep with its own"),
    "own compute_loss": (OwnLoss, {}, "with the compute_loss of Keras from --model .* received OwnLoss with its own"),
    "other outputs in training": (OtherOutputsInTraining, {}, r"expected outputs \(n, 3\) .* received tuple; return"),
    "layers in call": (MakesLayers, {}, "makes layers in its call, whose weights no step would train"),
    "stateful": (Stateful, {}, "received lstm.*, which takes its state from the batch before; leave stateful=True out"),
    "float16": (lambda: in_layers_of("mixed_float16"), {}, "gradients vanish without a loss scale; give --precision"),
    "built before --precision": (Custom, {"precision": "bf16"}, "compute in bfloat16; give a function that builds it"),
    "strategy": (under_strategy, {}, "received one in the scope of MirroredStrategy; leave the scope out"),
    "float8": (float8, {}, "has .*scale, a scale of float8, which is no weight; leave float8 out"),
    "masked outputs": (lambda: stacked(VECTORS, layers.Masking()), {}, "ends in a mask of its outputs"),
    "no gradient": (lambda: ended(lambda y: keras.ops.one_hot(keras.ops.argmax(y, -1), 3)), {}, "without a gradient"),
    "answers": (lambda: ended(lambda y: y > 0), {}, "floating-point numbers as outputs of --model .* received .*bool"),
    "counter": (lambda: stacked(VECTORS, Counts("int32")), PASSES, "changes .*count in each pass, of which"),
    "counter of floats": (lambda: stacked(VECTORS, Counts("float32")), PASSES, "changes .*count in each pass"),
    "spectral normalization": (
        lambda: stacked(VECTORS, layers.SpectralNormalization(layers.Dense(7))), PASSES, "changes .*kernel in each pass"
    ),
    "first samples": (lambda: stacked(VECTORS, SetsFromFirstSamples()), PASSES, "sets .*shift from its first samples"),
    "codebook": (lambda: stacked(VECTORS, Codebook()), PASSES, "changes .*vectors by the samples of each pass"),
    "coupled": (lambda: stacked(VECTORS, Centred()), PASSES, COUPLED),
    "coupled by operations": (centred_by_operations, PASSES, COUPLED),
    "experts with room": (lambda: stacked(VECTORS, Experts()), PASSES, COUPLED),
    "adds a sum": (lambda: stacked(VECTORS, AddsSum()), PASSES, COUPLED),
    "adds at least": (lambda: stacked(VECTORS, AddsAtLeast()), PASSES, COUPLED),
    "changes gradients": (
        lambda: stacked(VECTORS, layers.Dense(6), layers.Lambda(with_clipped_gradient)), PASSES,
        "changes gradients by their size, as hooks do",
    ),
    "adds what is recomputed": (
        lambda: stacked(VECTORS, layers.Dense(6, activity_regularizer="l2")), {"recompute": True},
        "has layers that add to the loss, whose gradients --recompute would lose; leave it out",
    ),
    "recomputed weights": (
        lambda: stacked(VECTORS, layers.SpectralNormalization(layers.Dense(7))), {"recompute": True},
        "changes .*kernel in each pass, which --recompute would do twice a pass; leave it out",
    ),
    "recomputed code": (
        Custom, {"recompute": True}, "a functional model of one input for --recompute, received Custom; leave it out",
    ),
    "recomputed draws": (
        lambda: stacked(VECTORS, DrawsByTensorFlow()), {"recompute": True}, "keras.random, in each pass, which --recom",
    ),
    "centres gradients": (
        lambda: stacked(VECTORS, layers.Dense(6), layers.Lambda(with_centred_gradient)), PASSES,
        "or by the other samples",
    ),
    "loss that is a sum": (
        Custom, {**PASSES, "loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")},
        "expected a loss of each sample by itself, or the mean",
    ),
    "loss without a reduction": (
        Custom,
        {"loss": keras.losses.SparseCategoricalCrossentropy(True, reduction=None)},
        "received SparseCategoricalCrossentropy with reduction=None, whose losses Keras adds up in training; leave",
    ),
    "loss with a variable": (Custom, {"loss": RunningLoss()}, "RunningLoss of --loss has a variable, mean, which"),
    "apply_gradients": (Custom, {"optimizer": SignsGradients(RATE)}, "SignsGradients has an apply_gradients of its"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_step(name):
    build, flags, line = REFUSED[name]
    samples = SERIES if build is Stateful else VECTORS
    with pytest.raises(UserError, match=line):
        trained(samples, build, **flags)


def test_what_a_program_sets_for_all_of_keras_is_refused():
    data = VECTORS, LABELS
    try:
        for policy, precision in (("mixed_float16", "float32"), ("float32", "bf16")):
            with pytest.raises(UserError, match=rf"policy \S+, which --precision sets, received {policy}; leave"):
                Session(lambda *_: under_policy(policy), data, data, precision=precision).fit()  # noqa: B023
            assert keras.config.dtype_policy().name == "float32"
        keras.config.set_dtype_policy("mixed_bfloat16")
        with pytest.raises(UserError, match="to have the policy float32, .* received mixed_bfloat16; leave it to"):
            Session(Custom(), data, data).fit()
        keras.config.set_dtype_policy("float32")
        tf.config.run_functions_eagerly(True)
        with pytest.raises(UserError, match="expected TensorFlow to run functions as graphs, received run_functions"):
            Session(Custom(), data, data).fit()
        tf.config.run_functions_eagerly(False)
        refused = pytest.raises(UserError, match=r"expected no strategy of tf.distribute, received OneDevice\S+; leave")
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), refused:
            Session(Custom(), data, data).fit()
    finally:
        keras.config.set_dtype_policy("float32")
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize(
    ("layer", "state"),
    [(partial(Forgetful, True), "calls"), (Forgetful, "calls"), (DrawsByTensorFlow, "keras.random,")],
)
def test_what_checkpoints_lack_is_told_and_no_run_resumes_without_it(layer, state, tmp_path, capsys):
    flags = {"output_dir": str(tmp_path)}
    trained(VECTORS, lambda: stacked(VECTORS, layer()), epochs=1, **flags)
    assert f"{state} in training, which checkpoints lack, so that --resume will be refused" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"computes with .*{state}, which it changes in training and checkpoints lack"):
        trained(VECTORS, lambda: stacked(VECTORS, layer()), epochs=2, resume="latest", **flags)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"use_ema": True}, "SGD cannot replace weights by averages in a Session; give ema, which keeps both"),
        ({"loss_scale_factor": 8.0}, "SGD cannot scale losses in a Session; give precision='fp16'"),
        ({"gradient_accumulation_steps": 2}, "SGD cannot accumulate gradients in a Session; give accumulate_steps"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_the_run_has_a_flag_for_is_refused_in_an_optimizer(options, line):
    with pytest.raises(UserError, match=line):
        trained(VECTORS, Custom, optimizer=keras.optimizers.SGD(RATE, **options))


def test_what_is_likely_a_mistake_is_told(capsys):
    trained(VECTORS, lambda: keras.Sequential([layers.Input((5,)), layers.Dense(3, "softmax")]), epochs=1)
    assert "seems to end in a softmax: its outputs add up to 1, where the loss expects" in capsys.readouterr().err
    trained(VECTORS, frozen, epochs=1)
    told = capsys.readouterr().err
    assert "is compiled; the loss and the optimizer of the run replace those of compile" in told
    assert "softmax" not in told
    pixels = IMAGES.astype("uint8")
    trained(pixels, lambda: stacked(pixels, layers.Rescaling(1 / 255), layers.Flatten()), epochs=1)
    assert "pixels, which the network gets less their mean and divided by their deviation" in capsys.readouterr().err
    embedded = lambda: stacked(WORDS, layers.Embedding(9, 4), layers.Flatten())  # noqa: E731
    for optimizer, count in ((keras.optimizers.Adam(0.01), 1), (keras.optimizers.SGD(0.1), 0)):
        trained(WORDS, embedded, epochs=1, optimizer=optimizer)
        line = "Adam gets the sum of all gradients of a row of sequential/embedding"
        assert capsys.readouterr().err.count(line) == count


def test_devices_are_asked_for_before_tensorflow_starts():
    with pytest.raises(UserError, match="give it a function that builds the model"):
        trained(VECTORS, Custom, strategy="mirrored", num_devices=3)
