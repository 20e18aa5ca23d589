"""Checks of whether a run's data flags fit together, before a framework is imported or a file is read."""

import math
import os
from dataclasses import fields

from allstep.common.base.errors import UserError, quote
from allstep.common.catalog.networks import MODELS, check_image_size
from allstep.common.catalog.user_file import PROGRAM
from allstep.common.config.data_config import FORMATS, PYTHON, DataConfig
from allstep.common.config.train_config import DEFAULT_BATCH_SIZE, TrainConfig

_OF_SAMPLES = tuple(name for name in FORMATS if name != "text")
# Kinds of data sets that use a flag.
DATA_FLAGS = {
    **dict.fromkeys(("task", "input_fields", "target_field"), (*_OF_SAMPLES, PYTHON, PROGRAM)),
    "validation_share": ("image-folder", *_OF_SAMPLES, PYTHON, PROGRAM),
    "text_tokens": ("text",),
    "data_workers": (PYTHON, PROGRAM),
    "validation_part": ("image-folder", *_OF_SAMPLES),
    **dict.fromkeys(("exif_orientation", "image_size"), ("image-folder", *_OF_SAMPLES[1:])),
}


def check_data(data: DataConfig) -> None:
    """Refuse flags that the data set would ignore."""
    kind = data.kind if data.path or data.kind != "text" else "the built-in text"
    for name, kinds in DATA_FLAGS.items():
        if kind not in kinds and getattr(data, name) != getattr(DataConfig, name):
            raise UserError(
                f"--{name.replace('_', '-')} has no effect on --dataset {quote(data.dataset)}; leave it out"
            )


def check_curriculum(data: DataConfig) -> None:
    """Refuse --curriculum-* flags without --curriculum, and a curriculum that does not fit a data set of known size."""
    if data.curriculum and data.sampler != "shuffle":
        raise UserError(
            f"expected --curriculum or --sampler {data.sampler}, received both orders of the samples; leave one out"
        )
    for item in fields(DataConfig):
        value = getattr(data, item.name)
        if item.name.startswith("curriculum_") and value != item.default and not data.curriculum:
            raise UserError(f"expected --curriculum with --{item.name.replace('_', '-')}, received none; name a file")
    if data.curriculum:
        from allstep.common.data.sharding import curriculum_of

        curriculum_of(data, num_samples_of(data))


def num_samples_of(data: DataConfig) -> int | None:
    """Return the number of training samples if it is known without the files of the data set, else None."""
    return {"digits": 1437, "synthetic": data.synthetic_samples}.get(data.dataset)


def check_images(config: TrainConfig) -> None:
    """Refuse images that are too small for the network or too large for memory, if flags set their size."""
    data = config.data
    shapes = {"synthetic": data.synthetic_shape, "image-folder": (data.image_size, data.image_size, 3)}
    if data.dataset not in shapes:
        return
    shape, num_classes = shapes[data.dataset], data.synthetic_classes if data.dataset == "synthetic" else 1
    check_image_size(config.model, *shape[:2])
    batch_size = config.schedule.batch_size or DEFAULT_BATCH_SIZE
    if config.schedule.global_batch_size is not None:
        batch_size = 1  # the minimum of a rank
    needed = 4 * (batch_size * math.prod(shape) + _num_weights(config.model, shape, num_classes))
    needed += 256 * num_classes * shape[2]  # patterns from which synthetic images are made
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        images = "x".join(map(str, shape))
        raise UserError(
            f"expected a network and a batch for the {memory / 2**30:.3g} GiB of this machine, received {batch_size} "
            f"images of {images} for --model {config.model}, which take {needed / 2**30:.3g} GiB and more; make them "
            "smaller"
        )


def _num_weights(model: str, shape: tuple[int, int, int], num_classes: int) -> int:
    """Return the number of weights in the layers that grow with images and classes."""
    height, width, channels = shape
    first = {"mlp": height * width * channels, "cnn": 64 * ((height - 4) // 2) * ((width - 4) // 2)}.get(model, 0)
    features = MODELS[model].num_features if model in MODELS else 0
    return 128 * first + features * num_classes
