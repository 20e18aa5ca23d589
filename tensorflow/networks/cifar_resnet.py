"""ResNets for images of 32 x 32 pixels (He et al. 2016, section 4.2); `pytorch/networks/cifar_resnet.py` builds the
same ones.

A network of depth 6n + 2 has three stages of n blocks, with 16, 32 and 64 channels. Shortcuts have no weights: at the
start of a stage they take every second row and column and pad with channels of zeros, half of them before the others
and half after (option A of the paper).
"""

from typing import cast

import keras
from keras import layers

from allstep.tensorflow.networks.resnet import convolve


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build resnet32, resnet44, resnet56 or resnet110 for images of any size and number of channels."""
    num_blocks = (int(name.removeprefix("resnet")) - 2) // 6
    inputs = cast("keras.KerasTensor", layers.Input(image_shape))  # Keras' annotations do not tell
    values = layers.ReLU()(convolve(inputs, 16, 3, "conv1", "bn1"))
    for stage, width in enumerate((16, 32, 64), start=1):
        for index in range(num_blocks):
            values = _block(values, width, f"layer{stage}.{index}")
    values = layers.GlobalAveragePooling2D()(values)
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(values))


def _block(inputs: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    """Apply two convolutions and a shortcut; a block that adds channels halves the image."""
    added = width - inputs.shape[-1]
    shortcut = inputs
    if added:
        shortcut = keras.ops.pad(inputs[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (added // 2, added // 2)))
    values = layers.ReLU()(convolve(inputs, width, 3, f"{name}.conv1", f"{name}.bn1", stride=2 if added else 1))
    values = convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2")
    return layers.ReLU()(values + shortcut)
