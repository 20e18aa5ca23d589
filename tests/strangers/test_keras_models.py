"""Keras models in other people's styles in a Session. Oracle: `fit` of plain Keras with the whole batch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from allstep.common.base.errors import UserError
from allstep.tensorflow import Session

SIZE, EPOCHS, RATE = 24, 3, 0.05
random = np.random.default_rng(0)
VECTORS = random.standard_normal((SIZE, 5)).astype(np.float32)
IMAGES = random.standard_normal((SIZE, 8, 8, 2)).astype(np.float32)
SERIES = random.standard_normal((SIZE, 7, 4)).astype(np.float32) * (np.arange(7) < 4)[:, None]
WORDS = random.integers(0, 9, (SIZE, 7))
LABELS = np.arange(SIZE) % 3


def stacked(samples, *hidden):
    kind = "int64" if samples is WORDS else "float32"
    return keras.Sequential([layers.Input(samples.shape[1:], dtype=kind), *hidden, layers.Dense(3)])


class Custom(keras.Model):
    """Model without an input layer; subclasses change what they are named after."""

    def __init__(self):
        super().__init__()
        self.hidden, self.logits = layers.Dense(4), layers.Dense(3)

    def call(self, inputs, training=False):
        return self.logits(self.hidden(inputs))


class AddsLossAndMetric(Custom):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, inputs, training=False):
        outputs = super().call(inputs)
        self.mean.update_state(outputs)
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class TiedWeights(Custom):
    def call(self, inputs, training=False):
        return self.logits(self.hidden(inputs) @ tf.transpose(self.hidden.kernel))


class Counts(layers.Layer):
    def __init__(self, dtype_of_count):
        super().__init__()
        self.count = self.add_weight(shape=(), dtype=dtype_of_count, trainable=False, initializer="zeros", name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs * (1 + 0.1 * tf.cast(self.count, inputs.dtype))


class SetsFromFirstSamples(layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros", name="shift")

    def call(self, inputs, training=False):
        if training:
            self.shift.assign(tf.where(tf.reduce_all(self.shift == 0), -tf.reduce_mean(inputs, 0), self.shift))
        return inputs + self.shift


class Codebook(layers.Layer):
    """Vectors that follow the samples, as a moving average of Keras would be named otherwise."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="vectors")

    def call(self, inputs, training=False):
        if training:
            self.vectors.assign(0.9 * self.vectors + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs - self.vectors


class Centred(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, 0)


class Experts(layers.Layer):
    """Experts with room for a few samples of a batch; those that come later pass by."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = layers.Dense(2), [layers.Dense(5) for _ in range(2)]

    def call(self, inputs):
        chosen = keras.ops.one_hot(keras.ops.argmax(self.router(inputs), -1), 2)
        has_room = keras.ops.cumsum(chosen, 0) <= keras.ops.cast(keras.ops.shape(inputs)[0] // 3, "float32")
        kept = chosen * keras.ops.cast(has_room, "float32")
        return inputs + sum(kept[:, number, None] * one(inputs) for number, one in enumerate(self.experts))


class AddsSum(layers.Layer):
    """A loss that is a sum over samples, which Keras adds to a mean."""

    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(inputs)))
        return inputs


class Begins(layers.Layer):
    """A flag of Python, of which Keras sees the first value when it traces a step."""

    def __init__(self):
        super().__init__()
        self.has_begun = False

    def call(self, inputs, training=False):
        outputs = inputs if self.has_begun or not training else 2 * inputs
        self.has_begun = self.has_begun or bool(training)
        return outputs


class DrawsByTensorFlow(layers.Layer):
    def call(self, inputs, training=False):
        return inputs + tf.random.normal(tf.shape(inputs), seed=1) if training else inputs


class Returns(Custom):
    """A network whose outputs a function wraps."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def call(self, inputs, training=False):
        return self.wrap(super().call(inputs), training)


class RunningLoss(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(1.0, trainable=False)

    def call(self, targets, outputs):
        self.mean.assign(0.9 * self.mean + 0.1)
        return self.mean * keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


class SignsGradients(keras.optimizers.SGD):
    def apply_gradients(self, pairs):
        return super().apply_gradients([(tf.sign(gradient), variable) for gradient, variable in pairs])


@tf.custom_gradient
def with_clipped_gradient(inputs):
    return tf.identity(inputs), lambda gradient: tf.clip_by_norm(gradient, 0.01)


def centred_by_operations():
    """Return a network of Keras' own layers and operations, one of which computes samples together."""
    inputs = layers.Input((5,))
    hidden = layers.BatchNormalization()(inputs)
    return keras.Model(inputs, layers.Dense(3)(hidden - keras.ops.mean(hidden, axis=0)))


class Forgetful(layers.Layer):
    """A variable of TensorFlow, which Keras does not know."""

    def __init__(self, in_list=False):
        super().__init__()
        calls = tf.Variable(0.0, trainable=False)
        self.calls = [calls] if in_list else calls

    def call(self, inputs, training=False):
        calls = self.calls[0] if isinstance(self.calls, list) else self.calls
        if training:
            calls.assign_add(1.0)
        return inputs * (1 + 0.1 * calls)


def adapted(samples):
    layer = layers.Normalization()
    layer.adapt(samples)
    return layer


def frozen():
    model = stacked(VECTORS, layers.Dense(6), layers.BatchNormalization(), layers.Dense(4))
    model.compile("adam", "mse")
    for layer in model.layers[:2]:
        layer.trainable = False
    return model


def with_named_input():
    inputs = layers.Input((5,), name="features")
    return keras.Model({"features": inputs}, [layers.Dense(3)(inputs)])


def quantised():
    model = stacked(VECTORS, layers.Dense(6))
    model.layers[0].quantize("int8")
    return model


def in_layers_of(policy):
    return keras.Sequential([layers.Input((5,)), layers.Dense(4, dtype=policy), layers.Dense(3, dtype=policy)])


def bounded():
    options = {"kernel_constraint": keras.constraints.MaxNorm(0.3), "bias_constraint": keras.constraints.NonNeg()}
    return stacked(VECTORS, layers.Dense(7, **options))


TRAIN = {
    "spectral normalization": (VECTORS, lambda: stacked(VECTORS, layers.SpectralNormalization(layers.Dense(7)))),
    "batch norm over another axis": (
        IMAGES, lambda: stacked(IMAGES, layers.BatchNormalization(axis=1, momentum=0.5, center=False), layers.Flatten())
    ),
    "group norm": (IMAGES, lambda: stacked(IMAGES, layers.GroupNormalization(2), layers.GlobalAveragePooling2D())),
    "masked, two ways": (SERIES, lambda: stacked(SERIES, layers.Masking(), layers.Bidirectional(layers.GRU(4)))),
    "masked words": (WORDS, lambda: stacked(WORDS, layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4))),
    "looked up": (
        WORDS, lambda: stacked(WORDS, layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot"))
    ),
    "hashed": (WORDS, lambda: stacked(WORDS, layers.Hashing(5), layers.Embedding(5, 3), layers.Flatten())),
    "adapted": (VECTORS, lambda: stacked(VECTORS, adapted(3 * VECTORS + 1))),
    "constraints": (VECTORS, bounded),
    "frozen after compile": (VECTORS, frozen),
    "quantised": (VECTORS, quantised),
    "bfloat16 in its layers": (VECTORS, lambda: in_layers_of("mixed_bfloat16")),
    "adds loss and metric": (VECTORS, AddsLossAndMetric),
    "tied weights": (VECTORS, TiedWeights),
    "named input, list of outputs": (VECTORS, with_named_input),
    "counter": (VECTORS, lambda: stacked(VECTORS, Counts("int32"))),
    "first samples": (VECTORS, lambda: stacked(VECTORS, SetsFromFirstSamples())),
    "codebook": (VECTORS, lambda: stacked(VECTORS, Codebook())),
    "coupled": (VECTORS, lambda: stacked(VECTORS, Centred())),
    "adds a sum": (VECTORS, lambda: stacked(VECTORS, AddsSum())),
    "traced flag": (VECTORS, lambda: stacked(VECTORS, Begins())),
}  # fmt: skip


def plain(samples, build, optimizer, run_eagerly=True):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=run_eagerly)
    model.fit(samples, LABELS, SIZE, EPOCHS, verbose=0, shuffle=False)
    return model


def trained(samples, build, **flags):
    keras.backend.clear_session()  # names of layers count on, and checkpoints have them
    keras.utils.set_random_seed(1)
    model = build()
    model(samples[:2])
    data = samples, LABELS
    Session(model, data, data, **{"epochs": EPOCHS, "global_batch_size": SIZE, **flags}).fit()
    return model


SGD = {"optimizer": "sgd", "momentum": 0.0, "base_lr": RATE}


def same_weights(one, other, atol=1e-5):
    for found, expected in zip(one.weights, other.weights, strict=True):
        message = expected.path
        np.testing.assert_allclose(found.value.numpy(), expected.value.numpy(), 1e-4, atol, err_msg=message)


@pytest.mark.parametrize("name", TRAIN)
def test_trains_as_keras_does(name):
    samples, build = TRAIN[name]
    expected = plain(samples, build, keras.optimizers.SGD(RATE), run_eagerly=name != "traced flag")
    atol = 1e-3 if "bfloat16" in name else 1e-5
    same_weights(trained(samples, build, **SGD), expected, atol)


WRAPS = {
    "object": lambda logits, _: SimpleNamespace(logits=logits, loss=None),
    "dictionary": lambda logits, _: {"logits": logits, "features": logits},
    "in training alone": lambda logits, training: (logits, None) if training else logits,
}


@pytest.mark.parametrize("name", WRAPS)
def test_networks_train_on_their_logits(name):
    expected = plain(VECTORS, Custom, keras.optimizers.SGD(RATE))
    same_weights(trained(VECTORS, lambda: Returns(WRAPS[name]), **SGD), expected)


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


def float8():
    model = stacked(VECTORS, layers.Dense(6))
    model.quantize("float8")
    return model


PASSES = {"accumulate_steps": 2}
REFUSED = {
    "own train_step": (OwnStep, {}, "with the train_step of Keras from --model .* received OwnStep with its own"),
    "own compute_loss": (OwnLoss, {}, "with the compute_loss of Keras from --model .* received OwnLoss with its own"),
    "other outputs in training": (OtherOutputsInTraining, {}, r"expected outputs \(n, 3\) .* received tuple; return"),
    "stateful": (Stateful, {}, "received lstm.*, which takes its state from the batch before; leave stateful=True out"),
    "float16": (lambda: in_layers_of("mixed_float16"), {}, "gradients vanish without a loss scale; give --precision"),
    "built before --precision": (Custom, {"precision": "bf16"}, "compute in bfloat16; give a function that builds it"),
    "float8": (float8, {}, "has .*scale, a scale of float8, which is no weight; leave float8 out"),
    "masked outputs": (lambda: stacked(VECTORS, layers.Masking()), {}, "ends in a mask of its outputs"),
    "counter": (lambda: stacked(VECTORS, Counts("int32")), PASSES, "changes .*count in each pass, of which"),
    "counter of floats": (lambda: stacked(VECTORS, Counts("float32")), PASSES, "changes .*count in each pass"),
    "spectral normalization": (
        lambda: stacked(VECTORS, layers.SpectralNormalization(layers.Dense(7))), PASSES, "changes .*kernel in each pass"
    ),
    "first samples": (lambda: stacked(VECTORS, SetsFromFirstSamples()), PASSES, "sets .*shift from its first samples"),
    "codebook": (lambda: stacked(VECTORS, Codebook()), PASSES, "changes .*vectors by the samples of each pass"),
    "coupled": (lambda: stacked(VECTORS, Centred()), PASSES, "computes the samples of a pass together"),
    "coupled by operations": (centred_by_operations, PASSES, "computes the samples of a pass together"),
    "experts with room": (lambda: stacked(VECTORS, Experts()), PASSES, "computes the samples of a pass together"),
    "adds a sum": (lambda: stacked(VECTORS, AddsSum()), PASSES, "computes the samples of a pass together"),
    "changes gradients": (
        lambda: stacked(VECTORS, layers.Dense(6), layers.Lambda(with_clipped_gradient)), PASSES,
        "changes gradients by their size, as hooks do",
    ),
    "loss that is a sum": (
        Custom, {**PASSES, "loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")},
        "expected a loss of each sample by itself, or the mean",
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


def without_decay_of_biases():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.SGD(RATE, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(RATE, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.Adam(RATE, global_clipnorm=0.1),
    "exclusions": without_decay_of_biases,
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_in_keras(name):
    make = OPTIMIZERS[name]
    same_weights(trained(VECTORS, Custom, optimizer=make()), plain(VECTORS, Custom, make()))


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
    embedded = lambda: stacked(WORDS, layers.Embedding(9, 4), layers.Flatten())  # noqa: E731
    for optimizer, count in ((keras.optimizers.Adam(0.01), 1), (keras.optimizers.SGD(0.1), 0)):
        trained(WORDS, embedded, epochs=1, optimizer=optimizer)
        line = "Adam gets the sum of all gradients of a row of sequential/embedding"
        assert capsys.readouterr().err.count(line) == count


def test_devices_are_asked_for_before_tensorflow_starts():
    with pytest.raises(UserError, match="give it a function that builds the model"):
        trained(VECTORS, Custom, strategy="mirrored", num_devices=3)


class Noise(layers.Layer):
    """Draws from the global generator of Keras, and from one of its own."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, inputs, training=False):
        own = self.generator.normal(tf.shape(inputs))
        return inputs + keras.random.normal(tf.shape(inputs)) + own if training else inputs


def test_random_layers_go_on_as_if_undisturbed(tmp_path):
    hidden = layers.Dropout(0.5), layers.GaussianNoise(0.1), Noise()
    undisturbed = trained(VECTORS, lambda: stacked(VECTORS, *hidden), epochs=2, output_dir=str(tmp_path / "a"))
    for flags in ({"epochs": 1}, {"epochs": 2, "resume": "latest"}):
        hidden = layers.Dropout(0.5), layers.GaussianNoise(0.1), Noise()
        resumed = trained(VECTORS, lambda: stacked(VECTORS, *hidden), output_dir=str(tmp_path / "b"), **flags)  # noqa: B023
    same_weights(resumed, undisturbed)


def test_state_that_layers_derive_comes_from_the_checkpoint(tmp_path):
    """The second model is adapted to other samples; the checkpoint's statistics replace its."""

    def first():
        return stacked(VECTORS, adapted(3 * VECTORS + 1))

    whole = trained(VECTORS, first, epochs=2, output_dir=str(tmp_path / "a"))
    trained(VECTORS, first, epochs=1, output_dir=str(tmp_path / "b"))
    resumed = trained(
        VECTORS, lambda: stacked(VECTORS, adapted(VECTORS)), epochs=2, resume="latest", output_dir=str(tmp_path / "b")
    )
    same_weights(resumed, whole)
    np.testing.assert_allclose(resumed(VECTORS), whole(VECTORS), rtol=1e-4, atol=1e-5)
