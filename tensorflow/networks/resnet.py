"""Residual networks with torchvision's names: those of He et al. 2016, and wide ones.

`pytorch/networks/resnet.py` builds the same ones.
"""

from typing import cast

import keras
from keras import layers

from allstep.tensorflow.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int, **size: int) -> keras.Model:
    """Build the network of that name for images of any size and number of channels; a wide one has a `size`."""
    inputs = cast("keras.KerasTensor", layers.Input(image_shape))  # Keras' annotations do not tell
    apply = _wide if size else _resnet if name in ("resnet18", "resnet50") else _cifar
    values = layers.GlobalAveragePooling2D()(apply(inputs, name, **size))
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(values))


def _resnet(inputs: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Apply resnet18 or resnet50, with the stride in the 3x3 convolution of a bottleneck (version 1.5)."""
    block, num_blocks = {"resnet18": (_basic_block, (2, 2, 2, 2)), "resnet50": (_bottleneck, (3, 4, 6, 3))}[name]
    values = layers.ReLU()(_convolve(inputs, 64, 7, "conv1", "bn1", stride=2))
    # Zeros can pad a max pooling, because a ReLU's outputs are never less.
    values = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(values))
    for stage, number in enumerate(num_blocks):
        for index in range(number):
            stride = 2 if stage and not index else 1
            values = block(values, 64 * 2**stage, f"layer{stage + 1}.{index}", stride=stride)
    return values


def _basic_block(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    values = layers.ReLU()(_convolve(inputs, width, 3, f"{name}.conv1", f"{name}.bn1", stride=stride))
    values = _convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2")
    return layers.ReLU()(values + _shortcut(inputs, width, name, stride=stride))


def _bottleneck(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    values = layers.ReLU()(_convolve(inputs, width, 1, f"{name}.conv1", f"{name}.bn1"))
    values = layers.ReLU()(_convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2", stride=stride))
    values = _convolve(values, 4 * width, 1, f"{name}.conv3", f"{name}.bn3")
    return layers.ReLU()(values + _shortcut(inputs, 4 * width, name, stride=stride))


def _shortcut(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    if stride == 1 and inputs.shape[-1] == width:
        return inputs
    return _convolve(inputs, width, 1, f"{name}.downsample.0", f"{name}.downsample.1", stride=stride)


def _cifar(inputs: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Apply a network of depth 6n + 2 for images of 32 x 32 pixels (He et al. 2016, section 4.2).

    It has three stages of n blocks, with 16, 32 and 64 channels. Shortcuts have no weights: at the start of a stage
    they take every second row and column and pad with channels of zeros, half of them before the others and half after
    (option A of the paper).
    """
    num_blocks = (int(name.removeprefix("resnet")) - 2) // 6
    values = layers.ReLU()(_convolve(inputs, 16, 3, "conv1", "bn1"))
    for stage, width in enumerate((16, 32, 64), start=1):
        for index in range(num_blocks):
            values = _cifar_block(values, width, f"layer{stage}.{index}")
    return values


def _cifar_block(inputs: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    """Apply two convolutions and a shortcut; a block that adds channels halves the image."""
    added = width - inputs.shape[-1]
    shortcut = inputs
    if added:
        shortcut = keras.ops.pad(inputs[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (added // 2, added // 2)))
    values = layers.ReLU()(_convolve(inputs, width, 3, f"{name}.conv1", f"{name}.bn1", stride=2 if added else 1))
    values = _convolve(values, width, 3, f"{name}.conv2", f"{name}.bn2")
    return layers.ReLU()(values + shortcut)


def _wide(inputs: keras.KerasTensor, _name: str, *, depth: int, width: int) -> keras.KerasTensor:
    """Apply WRN-`depth`-`width` (Zagoruyko and Komodakis 2016) without dropout.

    Blocks normalise before they convolve. A network of depth 6n + 4 and width k has three groups of n blocks, with
    16 k, 32 k and 64 k channels; the second and the third halve the image.
    """
    num_blocks = (depth - 4) // 6
    values = _convolve_alone(inputs, 16, 3, "conv1")
    for number, stride in enumerate((1, 2, 2)):
        for index in range(num_blocks):
            name = f"group{number + 1}.{index}"
            values = _wide_block(values, 16 * 2**number * width, name, stride=1 if index else stride)
    return layers.ReLU()(BatchNorm(name="bn")(values))


def _wide_block(inputs: keras.KerasTensor, width: int, name: str, *, stride: int) -> keras.KerasTensor:
    """Normalise, rectify and convolve, twice; if the shape changes, the shortcut convolves the normalised input."""
    normalised = layers.ReLU()(BatchNorm(name=f"{name}.bn1")(inputs))
    shortcut = inputs
    if inputs.shape[-1] != width:
        shortcut = _convolve_alone(normalised, width, 1, f"{name}.shortcut", stride=stride)
    values = _convolve_alone(normalised, width, 3, f"{name}.conv1", stride=stride)
    values = layers.ReLU()(BatchNorm(name=f"{name}.bn2")(values))
    return cast("keras.KerasTensor", _convolve_alone(values, width, 3, f"{name}.conv2") + shortcut)


def _convolve(
    inputs: keras.KerasTensor, width: int, size: int, name: str, norm_name: str, *, stride: int = 1
) -> keras.KerasTensor:
    """Apply a convolution with PyTorch's padding, and batch norm."""
    return BatchNorm(name=norm_name)(_convolve_alone(inputs, width, size, name, stride=stride))


def _convolve_alone(
    inputs: keras.KerasTensor, width: int, size: int, name: str, *, stride: int = 1
) -> keras.KerasTensor:
    """Apply a convolution without bias, with PyTorch's padding, which is the same on both sides."""
    if stride == 1:
        padded, padding = inputs, "same"
    else:  # Keras' padding would add more on one side
        padded, padding = layers.ZeroPadding2D(size // 2)(inputs), "valid"
    return layers.Conv2D(width, size, stride, padding, use_bias=False, name=name)(padded)
