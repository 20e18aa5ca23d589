"""The networks of both frameworks: what everybody knows of one without importing its framework."""

from __future__ import annotations

from dataclasses import dataclass

from allstep.common.process.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A network, in both frameworks under the same name."""

    module: str
    """File in pytorch/networks/ and tensorflow/networks/."""
    num_features: int
    """Inputs of the last layer, whose other side are the classes; of wide-resnet for a width of 1."""
    most_stages: int
    """Layers with weights, as `--strategy model-parallel` can cut it; 1 where it cannot."""
    smallest_image: int = 1
    """Pixels on the shorter side that the layers need to leave anything."""
    patch_size: int = 1
    """Pixels of which both sides of an image have to be a multiple."""
    deep: bool = True
    """Whether rounding errors grow so fast that curves are compared over a few steps alone."""
    benchmark_image: tuple[int, int, int] = (224, 224, 3)
    """Height, width and channels of the images for which it was designed."""
    benchmark_classes: int = 1000


_MNIST = {"benchmark_image": (28, 28, 1), "benchmark_classes": 10, "deep": False}
_CIFAR = {"benchmark_image": (32, 32, 3), "benchmark_classes": 10}
_CIFAR_RESNET = {"module": "cifar_resnet", "num_features": 64, "most_stages": 6, **_CIFAR}

MODELS = {
    "mlp": ModelEntry(module="small", num_features=128, most_stages=3, **_MNIST),
    "cnn": ModelEntry(module="small", num_features=128, most_stages=4, smallest_image=6, **_MNIST),
    "resnet18": ModelEntry(module="resnet", num_features=512, most_stages=7),
    "resnet50": ModelEntry(module="resnet", num_features=2048, most_stages=7),
    "resnet32": ModelEntry(**_CIFAR_RESNET),
    "resnet44": ModelEntry(**_CIFAR_RESNET),
    "resnet56": ModelEntry(**_CIFAR_RESNET),
    "resnet110": ModelEntry(**_CIFAR_RESNET),
    "wide-resnet": ModelEntry(module="wide_resnet", num_features=64, most_stages=6, **_CIFAR),
    "vgg16": ModelEntry(module="vgg", num_features=4096, most_stages=2, smallest_image=32),
    "vit-tiny": ModelEntry(module="vision_transformer", num_features=192, most_stages=1, patch_size=16),
    "vit-small-images": ModelEntry(
        module="vision_transformer", num_features=64, most_stages=1, patch_size=4,
        benchmark_image=(28, 28, 1), benchmark_classes=10,
    ),
}  # fmt: skip
"""By the names of `--model`."""
WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH = 16, 4


def check_image_size(model: str, height: int, width: int) -> None:
    """Refuse images of which the layers of the network leave nothing, or that do not fall into its patches.

    Raises:
        UserError: says which would do.
    """
    entry = MODELS[model]
    if min(height, width) < entry.smallest_image:
        least = entry.smallest_image
        raise UserError(
            f"expected images of {least} x {least} pixels or more for --model {model}, received {height} x {width}; "
            "use mlp"
        )
    if height % entry.patch_size or width % entry.patch_size:
        raise UserError(
            f"expected images whose sides are multiples of {entry.patch_size} pixels for --model {model}, received "
            f"{height} x {width}; use another model"
        )


def check_size(model: str, depth: int, width: int) -> None:
    """Refuse --model-depth and --model-width that no network has.

    Raises:
        UserError: the network is of one size, or has no such depth.
    """
    if model != "wide-resnet" and (depth, width) != (WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH):
        raise UserError(
            f"expected --model-depth and --model-width with --model wide-resnet, received --model {model}, which comes "
            "in one size; leave them out"
        )
    if model == "wide-resnet" and (depth - 4) % 6:
        raise UserError(
            f"expected --model-depth to be 4 more than a multiple of 6 (10, 16, 22, 28, 40), received {depth}; give "
            "one of these"
        )
