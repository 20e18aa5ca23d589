"""Networks that train in seconds on one core; `pytorch/networks/small.py` builds the same ones."""

import keras
from keras import layers


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build mlp or cnn."""
    return {"mlp": _mlp, "cnn": _cnn}[name](image_shape, num_classes)


def _mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Build a network of two hidden layers with 128 units."""
    return keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="fc1"),
            layers.Dense(128, activation="relu", name="fc2"),
            layers.Dense(num_classes, name="fc3"),
        ]
    )


def _cnn(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build the CNN of the MNIST examples, without dropout; it has 1.2 million parameters at 28 x 28 x 1."""
    return keras.Sequential(
        [
            layers.Input(image_shape),
            layers.Conv2D(32, 3, activation="relu", name="conv1"),
            layers.Conv2D(64, 3, activation="relu", name="conv2"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="fc1"),
            layers.Dense(num_classes, name="fc2"),
        ]
    )
