"""Networks that are one sequence of layers: small ones that train in seconds on one core, and VGG-16.

`pytorch/networks/sequences.py` builds the same ones.
"""

import keras
from keras import layers

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions
_POOLED = 7


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build mlp, cnn or vgg16."""
    return {"mlp": _mlp, "cnn": _cnn, "vgg16": _vgg16}[name](image_shape, num_classes)


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


def _vgg16(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build VGG-16 (Simonyan and Zisserman 2015) without dropout, for images of 32 x 32 pixels or more.

    It has torchvision's topology and names. With 138 million weights, most of them in the first fully connected layer,
    it is the classic example of a network whose training is limited by communication.
    """
    values = inputs = layers.Input(image_shape)
    number = 0  # index of the layer in torchvision's sequence, which counts each ReLU and pooling as a layer
    for channels, num_convolutions in _STAGES:
        for _ in range(num_convolutions):
            values = layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"features.{number}")(values)
            number += 2
        values = layers.MaxPooling2D(2)(values)
        number += 1
    sides = [pixels // 2 ** len(_STAGES) for pixels in image_shape[:2]]
    if 1 in sides:  # Keras' adaptive pooling needs two pixels; repeating one does not change the means
        values = layers.UpSampling2D([2 if side == 1 else 1 for side in sides])(values)
    if set(sides) != {_POOLED}:
        values = layers.AdaptiveAveragePooling2D(_POOLED)(values)
    values = layers.Flatten()(values)
    values = layers.Dense(4096, activation="relu", name="classifier.0")(values)
    values = layers.Dense(4096, activation="relu", name="classifier.3")(values)
    return keras.Model(inputs, layers.Dense(num_classes, name="classifier.6")(values))
