"""Checks whether --decode gpu is possible in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig

# Augmentations that need the pixels on the CPU.
_CHANGES = ("mixup", "cutmix", "random_erasing", "rand_augment")


def check_decode(config: TrainConfig, framework: str) -> None:
    """Refuse --decode gpu if other flags rule out decoding on a GPU.

    Raises:
        UserError: another flag rules it out; the message names it.
    """
    data = config.data
    if data.decode != "gpu":
        return
    if framework == "tensorflow":
        raise UserError(
            "expected --decode cpu in TensorFlow, which has no decoder of JPEG files on GPUs, received gpu; leave it "
            "out, or train with PyTorch"
        )
    if data.dataset != "image-folder":
        raise UserError(f"expected --dataset image-folder with --decode gpu, received {data.dataset}; leave one out")
    if config.device == "cpu":
        raise UserError("expected --device auto or cuda with --decode gpu, received cpu; leave one of them out")
    for name in _CHANGES:
        if value := getattr(data, name):
            raise UserError(
                f"expected --decode cpu with --{name.replace('_', '-')}, which changes images on the CPU, received gpu "
                f"and {value}; leave one of them out"
            )


def check_decoding_device(decode: str, gpu: int | None) -> None:
    """Refuse --decode gpu if this rank trains on the CPU.

    Raises:
        UserError: the rank has no GPU.
    """
    if decode == "gpu" and gpu is None:
        raise UserError(
            "expected a GPU for each rank with --decode gpu, received ranks that train on the CPU; give --decode cpu"
        )
