"""VGG-16 (Simonyan and Zisserman 2015) with torchvision's topology and names, without dropout;
`pytorch/networks/vgg.py` builds the same one.

With 138 million weights, most of them in the first fully connected layer, it is the classic example of a network whose
training is limited by communication.
"""

import keras
from keras import layers

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions
_POOLED = 7


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build the network for images of 32 x 32 pixels or more and any number of channels."""
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
