"""Networks from a user's file and from keras.applications. Oracle: the file and Keras, called directly."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import is_in_both
from allstep.common.data.datasets import Dataset
from allstep.tensorflow.models import canonical_weights, export_weights, import_weights
from allstep.tensorflow.other_networks import build_other

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

class Own(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(num_classes, name="dense")
    def call(self, images):
        return self.dense(self.flatten(images))

def own(input_shape, num_classes): return Own(num_classes)
def user_pytorch(input_shape, num_classes): pass
def user_tensorflow(input_shape, num_classes): return Own(num_classes)
def too_many(input_shape, num_classes): return Own(num_classes + 1)
def raises(input_shape, num_classes): raise ValueError("no")
def nothing(input_shape, num_classes): pass
def no_weights(input_shape, num_classes): return keras.Sequential([layers.Flatten(), layers.Lambda(lambda x: x[:, :7])])
def half(input_shape, num_classes): return keras.Sequential([layers.Flatten(), layers.Dense(7, dtype="float16")])
def twins(input_shape, num_classes):
    model = Own(num_classes)
    model.other = layers.Dense(num_classes, name="dense")
    model.call = lambda images: model.other(model.flatten(images)) + model.dense(model.flatten(images))
    return model
"""
MISTAKES = {
    "too_many": r"expected outputs \(n, 7\) of --model .*, received \(n, 8\)",
    "raises": r"expected raises\(\) to return for --model, received ValueError: no in line 24 of .*mine.py",
    "nothing": "expected a keras.Model from --model .*, received NoneType",
    "no_weights": "expected a network with weights to train",
    "half": "expected weights in float32 of --model .* as .*dense",
    "twins": "expected a name of its own for each weight of --model .* received dense.bias twice",
    "missing": "expected a function missing in .*mine.py for --model, received none",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


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


@pytest.mark.parametrize("name", MISTAKES)
def test_networks_that_do_not_fit(name, file):
    with pytest.raises(UserError, match=MISTAKES[name]):
        build_other(f"{file}:{name}", IMAGES, 0)


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
