"""ResNet-18 and ResNet-50 (He et al. 2016) with torchvision's names; `pytorch/networks/resnet.py` builds the same ones.

The stride is in the 3x3 convolution of a bottleneck, as in the variant known as version 1.5.
"""

from typing import cast

import keras
from keras import layers

from allstep.tensorflow.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Build the network of that name for images of any size and number of channels."""
    block, num_blocks = {"resnet18": (_basic_block, (2, 2, 2, 2)), "resnet50": (_bottleneck, (3, 4, 6, 3))}[name]
    inputs = cast("keras.KerasTensor", layers.Input(image_shape))  # Keras' annotations do not tell
    values = layers.ReLU()(convolve(inputs, 64, 7, "conv1", "bn1", stride=2))
    # Zeros can pad a max pooling, because a ReLU's outputs are never less.
    values = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(values))
    for stage, number in enumerate(num_blocks):
        for index in range(number):
            stride = 2 if stage and not index else 1
            values = block(values, 64 * 2**stage, f"layer{stage + 1}.{index}", stride=stride)
    values = layers.GlobalAveragePooling2D()(values)
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(values))


def _basic_block(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    values = layers.ReLU()(convolve(inputs, width, 3, f"{name}.conv1", f"{name}.bn1", stride=stride))
    values = convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2")
    return layers.ReLU()(values + _shortcut(inputs, width, name, stride=stride))


def _bottleneck(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    values = layers.ReLU()(convolve(inputs, width, 1, f"{name}.conv1", f"{name}.bn1"))
    values = layers.ReLU()(convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2", stride=stride))
    values = convolve(values, 4 * width, 1, f"{name}.conv3", f"{name}.bn3")
    return layers.ReLU()(values + _shortcut(inputs, 4 * width, name, stride=stride))


def _shortcut(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    if stride == 1 and inputs.shape[-1] == width:
        return inputs
    return convolve(inputs, width, 1, f"{name}.downsample.0", f"{name}.downsample.1", stride=stride)


def convolve(
    inputs: keras.KerasTensor, width: int, size: int, name: str, norm_name: str, *, stride: int = 1
) -> keras.KerasTensor:
    """Apply a convolution with PyTorch's padding, and batch norm."""
    return BatchNorm(name=norm_name)(padded_convolution(inputs, width, size, name, stride=stride))


def padded_convolution(
    inputs: keras.KerasTensor, width: int, size: int, name: str, *, stride: int = 1
) -> keras.KerasTensor:
    """Apply a convolution without bias, with PyTorch's padding, which is the same on both sides."""
    if stride == 1:
        padded, padding = inputs, "same"
    else:  # Keras' padding would add more on one side
        padded, padding = layers.ZeroPadding2D(size // 2)(inputs), "valid"
    return layers.Conv2D(width, size, stride, padding, use_bias=False, name=name)(padded)
