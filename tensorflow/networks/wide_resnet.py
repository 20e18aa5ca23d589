"""Wide residual networks (Zagoruyko and Komodakis 2016) without dropout; `pytorch/networks/wide_resnet.py` builds
the same ones.

Blocks normalise before they convolve. A network of depth 6n + 4 and width k has three groups of n blocks, with 16 k,
32 k and 64 k channels; the second and the third halve the image.
"""

from typing import cast

import keras
from keras import layers

from allstep.tensorflow.networks.batch_norm import BatchNorm
from allstep.tensorflow.networks.resnet import padded_convolution


def build(name: str, image_shape: tuple[int, int, int], num_classes: int, *, depth: int, width: int) -> keras.Model:
    """Build WRN-`depth`-`width` for images of any size and number of channels."""
    num_blocks = (depth - 4) // 6
    inputs = cast("keras.KerasTensor", layers.Input(image_shape))  # Keras' annotations do not tell
    values = padded_convolution(inputs, 16, 3, "conv1")
    for number, stride in enumerate((1, 2, 2)):
        for index in range(num_blocks):
            name = f"group{number + 1}.{index}"
            values = _block(values, 16 * 2**number * width, name, stride=1 if index else stride)
    values = layers.GlobalAveragePooling2D()(layers.ReLU()(BatchNorm(name="bn")(values)))
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(values))


def _block(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    """Normalise, rectify and convolve, twice; if the shape changes, the shortcut convolves the normalised input."""
    normalised = layers.ReLU()(BatchNorm(name=f"{name}.bn1")(inputs))
    shortcut = inputs
    if inputs.shape[-1] != width:
        shortcut = padded_convolution(normalised, width, 1, f"{name}.shortcut", stride=stride)
    values = padded_convolution(normalised, width, 3, f"{name}.conv1", stride=stride)
    values = layers.ReLU()(BatchNorm(name=f"{name}.bn2")(values))
    return cast("keras.KerasTensor", padded_convolution(values, width, 3, f"{name}.conv2") + shortcut)
