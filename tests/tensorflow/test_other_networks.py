"""Networks from a user's file and from keras.applications. Oracle: the file and Keras, called directly."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import is_in_both
from allstep.common.config.train_config import StrategyConfig
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import ALONE
from allstep.tensorflow.models import canonical_weights, export_weights, import_weights
from allstep.tensorflow.other_networks import build_other
from allstep.tensorflow.strategies.distribute import Mirrored

IMAGES = Dataset(None, None, (4, 3, 2), 7)  # pyright: ignore[reportArgumentType] (nothing is read)
FILE = """
import keras
from keras import layers

def build(input_shape, num_classes):
    inner = keras.Sequential([layers.Dense(5, name="hidden")], name="inner")
    return keras.Sequential([
        layers.Input(input_shape), layers.Conv2D(3, 2, name="conv"), layers.BatchNormalization(name="norm"),
        layers.Flatten(), inner, layers.Dropout(0.5), layers.Dense(num_classes, use_bias=False, name="last"),
    ])
NAMES = {"last": "fc"}

def wide(input_shape, num_classes, *, width):
    hidden = layers.Dense(width)
    return keras.Sequential([layers.Input(input_shape), layers.Flatten(), hidden, layers.Dense(num_classes)])

class Own(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(num_classes, name="dense")
    def call(self, images):
        return self.dense(self.flatten(images))

def own(input_shape, num_classes): return Own(num_classes)
def own_pytorch(input_shape, num_classes): pass
def own_tensorflow(input_shape, num_classes): return Own(num_classes)
def too_few(input_shape, num_classes): return Own(num_classes - 1)
def raises(input_shape, num_classes): raise ValueError("no")
def nothing(input_shape, num_classes): pass
def wrong_width(input_shape, num_classes):
    model = Own(num_classes)
    model.call = lambda images: keras.ops.matmul(model.flatten(images), keras.ops.ones((5, num_classes)))
    return model
class Raises(Own):
    def call(self, images):
        raise ValueError("the line that says what is wrong")
def raises_in_call(input_shape, num_classes): return Raises(num_classes)
def fixed(input_shape, num_classes):
    inputs = layers.Input(batch_shape=(32, *input_shape))
    return keras.Model(inputs, layers.Dense(num_classes)(keras.ops.reshape(inputs, (32, -1))))
def no_weights(input_shape, num_classes): return keras.Sequential([layers.Flatten(), layers.Lambda(lambda x: x[:, :7])])
def half(input_shape, num_classes): return keras.Sequential([layers.Flatten(), layers.Dense(7, dtype="float16")])
def twins(input_shape, num_classes):
    model = Own(num_classes)
    model.other = layers.Dense(num_classes, name="dense")
    model.call = lambda images: model.other(model.flatten(images)) + model.dense(model.flatten(images))
    return model
"""
MISTAKES = {
    "too_few": r"expected outputs \(n, 7\) of --model .*, received \(n, 6\)",
    "raises": r"expected raises\(\) to return for --model, received ValueError: no in line 28 of .*mine.py",
    "raises_in_call": r"expected a network for samples of shape \(4, 3, 2\) for --model .*raises_in_call, received "
    r"ValueError: the line that says what is wrong in line 36 of .*mine.py; fix it$",
    "wrong_width": "received InvalidArgumentError: .*(24|5).* in line 32 of .*mine.py; fix it$",
    "fixed": r"expected a network for samples of shape \(4, 3, 2\) for --model .*fixed, received InvalidArg.* reshape",
    "nothing": "expected a keras.Model from --model .*, received NoneType",
    "no_weights": "expected a network with weights to train",
    "half": "computes in float16, .* give --precision fp16",
    "twins": "expected a name of its own for each weight of --model .* received dense.bias twice",
    "missing": "expected a function missing in .*mine.py for --model, received none",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_model_that_is_built_and_arguments_of_a_function(file):
    with file.open("a") as stream:
        stream.write("network = keras.Sequential([layers.Input((4, 3, 2)), layers.Flatten(), layers.Dense(7)])")
    assert build_other(f"{file}:network", IMAGES, 0).count_params() == 24 * 7 + 7
    model = build_other(f"{file}:wide", IMAGES, 0, None, {"width": 5})
    assert model.count_params() == 24 * 5 + 5 + 5 * 7 + 7
    with pytest.raises(UserError, match="--model-args needs a function that builds the network"):
        build_other(f"{file}:network", IMAGES, 0, None, {"width": 5})


def test_a_network_of_the_users_own(file):
    """Layers that PyTorch also has get its names and layouts; others are as in Keras."""
    model = build_other(f"{file}:build", IMAGES, 3)
    weights = export_weights(model)
    assert {name: array.shape for name, array in weights.items()} == {
        "conv.weight": (3, 2, 2, 2),
        "conv.bias": (3,),
        **{f"norm/{name}": (3,) for name in ("gamma", "beta", "moving_mean", "moving_variance")},
        "inner/hidden/kernel": (18, 5),
        "inner/hidden/bias": (5,),
        "fc.weight": (7, 5),
    }
    kernel = model.get_layer("last").kernel.numpy()
    np.testing.assert_array_equal(weights["fc.weight"], kernel.T)
    changed = {name: array + 1 for name, array in weights.items()}
    import_weights(model, changed)
    np.testing.assert_array_equal(model.get_layer("last").kernel.numpy(), kernel + 1)
    assert all(np.array_equal(changed[name], array) for name, array in export_weights(model).items())
    keras.utils.set_random_seed(3)
    again = build_other(f"{file}:build", IMAGES, 3)
    np.testing.assert_array_equal(export_weights(again)["fc.weight"], weights["fc.weight"])


def test_a_model_of_the_users_own_class(file):
    weights = export_weights(build_other(f"{file}:own", IMAGES, 0))
    assert {name: array.shape for name, array in weights.items()} == {"dense.weight": (7, 24), "dense.bias": (7,)}
    assert is_in_both(f"{file}:own") and not is_in_both(f"{file}:build")


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4), layers.Bidirectional(layers.LSTM(2)), layers.Dense(7)]
        self.nested = keras.Sequential([layers.BatchNormalization(), layers.Dense(4)])

    def call(self, inputs):
        first, both, last = self.parts
        return last(both(first(inputs[:, 0]))) + last(self.nested(inputs[:, 0, 0, :1]))


def with_a_shortcut():
    inputs = keras.Input((4, 3, 2))
    long, short = layers.Conv2D(3, 3, padding="same")(inputs), layers.Conv2D(3, 1)(inputs)
    added = layers.Add()([layers.Conv2D(3, 3, padding="same")(long), short])
    return keras.Model(inputs, layers.Dense(7)(layers.Flatten()(added)))


@pytest.mark.parametrize("build", [Nested, with_a_shortcut])
def test_a_network_that_is_built_again_has_the_names_of_the_first(build):
    """Keras counts the layers of a process."""
    keras.backend.clear_session()
    first, *others = [build_other("program", IMAGES, 0, lambda *_: build()) for _ in range(3)]
    names = [weight.name for weight in canonical_weights(first)]
    assert [[weight.name for weight in canonical_weights(other)] for other in others] == [names, names]
    layer_names = {name.partition("." if "." in name else "/")[0] for name in names}
    assert layer_names <= {layer.name for layer in first.layers} and len(set(names)) == len(names)


def test_numbers_in_another_order_than_the_layers_stay():
    """A name of the user's would change its number among those that Keras gives."""

    def build():
        return keras.Sequential([
            layers.Input((4, 3, 2)), layers.Flatten(), layers.Dense(7), layers.Dense(7, name="dense_1")
        ])  # fmt: skip

    keras.backend.clear_session()
    first, _, again = build(), layers.Dense(7), build()
    models = [build_other("program", IMAGES, 0, model) for model in (first, again)]
    kernels = [[weight.name for weight in canonical_weights(model)][::2] for model in models]
    assert kernels == [["dense.weight", "dense_1.weight"], ["dense_2.weight", "dense_1.weight"]]


@pytest.mark.parametrize("name", MISTAKES)
def test_networks_that_do_not_fit(name, file):
    with pytest.raises(UserError, match=MISTAKES[name]):
        build_other(f"{file}:{name}", IMAGES, 0)


def test_weights_of_layers_with_an_adapter():
    """After `enable_lora`, `layer.kernel` is a sum; the weights are the variables."""
    inputs = keras.Input((4, 3, 2))
    names = [layers.Conv2D(3, 2, name="conv"), layers.Flatten(), layers.Dense(5, name="fc")]
    model = keras.Sequential([inputs, *names])
    kernels = [model.get_layer(name).kernel.numpy() for name in ("conv", "fc")]
    for name in ("conv", "fc"):
        model.get_layer(name).enable_lora(2)
    weights = export_weights(model)
    np.testing.assert_array_equal(weights["conv.weight"], kernels[0].transpose(3, 2, 0, 1))
    assert len(weights) == len(model.weights) == 8
    changed = {name: array + 1 for name, array in weights.items()}
    import_weights(model, changed)
    for name, array in export_weights(model).items():
        np.testing.assert_array_equal(array, changed[name])


def test_a_network_of_keras():
    dataset = Dataset(None, None, (32, 32, 1), 7)  # pyright: ignore[reportArgumentType]
    model = build_other("keras:MobileNetV3Small", dataset, 0)
    theirs = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 1), weights=None, classes=7, include_preprocessing=False
    )
    assert model.count_params() == theirs.count_params()
    assert len(list(canonical_weights(model))) == len(theirs.weights)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("keras:ResNet51", (32, 32, 3), "that keras has, received keras:ResNet51; did you mean ResNet50"),
        ("keras:VGG16", (8, 8, 3), r"samples of shape \(8, 8, 3\) from --model keras:VGG16, received ValueError"),
    ],
)
def test_networks_that_keras_does_not_have(model, shape, expected):
    with pytest.raises(UserError, match=expected):
        build_other(model, Dataset(None, None, shape, 7), 0)  # pyright: ignore[reportArgumentType]


def test_a_network_whose_builder_ends_the_scope_of_the_strategy():
    """Keras' clear_session replaces the graph that holds the scope, of which TensorFlow's end then fails."""

    def cleared(*_: object) -> keras.Model:
        keras.backend.clear_session()
        return keras.Sequential([layers.Input((3,)), layers.Dense(7)])

    strategy = Mirrored(ALONE, StrategyConfig())
    strategy.strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    refused = pytest.raises(UserError, match=r"ends the scope of --strategy, as keras.backend.clear_session\(\) does")
    with refused, strategy.scope():
        build_other("a program", Dataset(None, None, (3,), 7), 0, cleared)  # pyright: ignore[reportArgumentType]
    assert not tf.distribute.has_strategy()
