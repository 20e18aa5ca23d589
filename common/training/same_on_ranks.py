"""Comparison of the flags and the data of all ranks, before they build a network.

Ranks with different flags would wait for each other without end, and ranks with different data would train on a
mixture. The digests of the data also show a resumed run that its samples are not those of the run before.

All labels are digested, and all inputs in memory or in files unless they are large. Of larger files the sizes and
checksums are digested, and a few samples as they are stored, because decoding may round differently on another machine.
For the same reason, only a warning follows if samples that a user's program computes have changed. The paths of files
make no difference.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError, warn
from allstep.common.checkpoint.select import checkpoint_directories
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset, Split
from allstep.common.data.datasets.base import Subset
from allstep.common.data.formats.python_file import CheckedSplit
from allstep.common.data.images.decoding import UnreadableImage
from allstep.common.data.sharding import Curriculum
from allstep.common.exact.replica_check import digest
from allstep.common.launch.env_launcher import check_same_flags, first_difference
from allstep.common.training.start import flags_of


def agreed(config: TrainConfig, collectives: Collectives) -> TrainConfig:
    """Compare the flags of all ranks, and return them with --resume auto resolved (see `resolve_auto`).

    Raises UserError if a flag is not the same on all ranks.
    """
    check_same_flags(_gathered(flags_of(config), collectives))
    return resolve_auto(config, collectives)


def resolve_auto(config: TrainConfig, collectives: Collectives) -> TrainConfig:
    """Replace --resume auto by latest, without --init-from, or by nothing if there is no checkpoint yet.

    Collective: rank 0 decides for all ranks, since other hosts may not see the output directory.
    """
    output = config.output
    if output.resume != "auto":
        return config
    assert output.output_dir is not None  # `validate` asks for one
    is_there = collectives.rank == 0 and bool(checkpoint_directories(output.output_dir / "checkpoints"))
    [is_there] = collectives.all_reduce_sum(np.array([float(is_there)]))
    changes = {"resume": "latest", "init_from": None} if is_there else {"resume": None}
    return dataclasses.replace(config, output=dataclasses.replace(output, **changes))


def check_same_data(dataset: Dataset, collectives: Collectives) -> None:
    """Raise UserError unless all ranks have the same data set."""
    if collectives.world_size == 1:
        return
    found = {
        "number of training samples": str(len(dataset.train)),
        "number of validation samples": str(len(dataset.validation)),
        "shape of samples": str(dataset.input_shape),
        "number of classes": str(dataset.num_classes),
    }
    digests = {f"digest of the {name}": value for name, value in digests_of(dataset).items()}
    if difference := first_difference(_gathered(found | digests, collectives)):
        name, rank, first, other = difference
        raise UserError(
            f"expected the same data set on all ranks, received another {name} on rank {rank} ({other}) than on rank 0 "
            f"({first}); have every rank open the whole data set, of which it is given its part"
        )


def _gathered(entries: Mapping[str, str], collectives: Collectives) -> list[dict[str, str]]:
    """Return the entries of all ranks; they are sent only if they differ."""
    if collectives.world_size == 1:  # as the stages of a pipeline are for the engine
        return [dict(entries)]
    content = np.frombuffer(json.dumps(entries).encode(), np.uint8)
    every = collectives.all_gather(np.array([len(content), digest(content)], np.int64))
    if (every == every[0]).all():
        return [dict(entries)]
    padded = np.zeros(int(every[:, 0].max()), np.int64)
    padded[: len(content)] = content
    rows = collectives.all_gather(padded)
    return [json.loads(row[:size].astype(np.uint8).tobytes()) for row, size in zip(rows, every[:, 0], strict=True)]


_SAMPLES_LOOKED_AT = 64
_SAMPLES_READ_TWICE = 16
_MAX_BYTES = 2**28
"""Size of inputs that are digested whole: a tenth of a second."""
_MAX_FILE_BYTES = 2**25
"""Size of files that are digested whole, the same for files that are slower to reach."""
_ROWS_AT_ONCE = _MAX_SIZES = 2**16
_AS_READ = " as the program reads them"
_FOUND: WeakKeyDictionary[Split, dict[str, str]] = WeakKeyDictionary()
"""Digests of each split in use: ranks compare them at the start, and rank 0 keeps them in checkpoints."""


def digests_of(dataset: Dataset) -> dict[str, str]:
    """Return a digest of each part of a data set, by the name of the part in error messages."""
    names = "\0".join(dataset.class_names).encode(errors="surrogatepass")  # folders may have any bytes
    digests = {"class names": _hashed([names])} if dataset.class_names else {}
    for name, split in (("training", dataset.train), ("validation", dataset.validation)):
        if split not in _FOUND:
            _FOUND[split] = _digests_of_split(split)
        digests |= {f"{name} {what}": digest for what, digest in _FOUND[split].items()}
    if isinstance(dataset.sampler, Curriculum):
        digests["order of --curriculum"] = _hashed([dataset.sampler.easiest_first])
    return digests


def _digests_of_split(split: Split) -> dict[str, str]:
    """Return the digests of a split's labels, and of its inputs if they can be compared."""
    digests = {"labels": _hashed([_labels(split)])}
    if getattr(_whole(split), "may_augment", False):
        if (inputs := _read_twice(split)) is not None:
            digests[f"inputs{_AS_READ}"] = _hashed([inputs])
        return digests
    digests["inputs"] = _hashed(_some_inputs(split))
    if blocks := _all_inputs(split) or _all_files(split):
        digests["samples"] = _hashed(blocks)
    return digests


def check_data(saved: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Compare a data set with that of a checkpoint, as far as both have digests; old checkpoints have none.

    Raises UserError that names the part that differs; warns if it is samples that a user's program computes.
    """
    for name, value in digests.items():
        if saved.get(name, value) == value:
            continue
        if name.endswith(_AS_READ):
            warn(f"the {name} are not those with which the checkpoint was written")
        else:
            raise UserError(
                f"the {name} of the data set are not those with which the checkpoint was written; resume with the same "
                "data in the same order, or use --init-from for the weights alone"
            )


def _labels(split: Split) -> np.ndarray:
    if isinstance(split, Subset):
        return split.targets[split.indices] if split.targets is not None else _some(split, 1)
    targets = getattr(split, "targets", None)
    return targets if targets is not None else _some(split, 1)


def _some_inputs(split: Split) -> list[Any]:
    """Return the inputs of a few samples, as bytes or arrays."""
    images = getattr(_whole(split), "images", None)
    if images is None:
        return [_some(split, 0)]
    return [_content(images, index) for index in _in_whole(split, _chosen(split))]


def _all_inputs(split: Split) -> Iterable[np.ndarray]:
    """Return the inputs of all samples in blocks; nothing if they are large, or not in memory."""
    size = split.read(np.arange(1), epoch=0)[0].nbytes if getattr(_whole(split), "in_memory", False) else 0
    if not 0 < size * len(split) <= _MAX_BYTES:
        return ()
    starts = range(0, len(split), _ROWS_AT_ONCE)
    return (split.read(np.arange(one, min(one + _ROWS_AT_ONCE, len(split))), epoch=0)[0] for one in starts)


def _all_files(split: Split) -> Iterable[bytes | np.ndarray]:
    """Return the stored bytes of all samples, or their sizes and checksums if large; nothing if not in files."""
    whole = _whole(split)
    source: Any = getattr(whole, "images", None) or getattr(whole, "samples", None)
    source = getattr(source, "index", source)
    if isinstance(whole, CheckedSplit) or not hasattr(source, "sizes"):
        return ()
    chosen = _in_whole(split, _chosen(split, _MAX_SIZES))
    sizes = source.sizes(chosen)
    if len(chosen) == len(split) and sizes.sum() <= _MAX_FILE_BYTES:
        return (_content(source, index) for index in chosen)
    if not hasattr(source, "checksums"):
        return (sizes,)
    return sizes, source.checksums(_in_whole(split, np.arange(len(split))))


def _whole(split: Split) -> Split:
    return split.whole if isinstance(split, Subset) else split


def _in_whole(split: Split, indices: np.ndarray) -> np.ndarray:
    return split.indices[indices] if isinstance(split, Subset) else indices


def _read_twice(split: Split) -> np.ndarray | None:
    """Return the inputs of some samples; None if they differ when they are read again."""
    first, second = (split.read(_chosen(split, _SAMPLES_READ_TWICE), epoch=0)[0] for _ in range(2))
    return first if np.array_equal(first, second) else None


def _content(images: Any, index: int) -> bytes:
    try:
        return images.content(int(index))
    except (UnreadableImage, OSError):
        return b""


def _some(split: Split, part: int) -> np.ndarray:
    return split.read(_chosen(split), epoch=0)[part]


def _chosen(split: Split, number: int = _SAMPLES_LOOKED_AT) -> np.ndarray:
    return np.linspace(0, len(split) - 1, min(len(split), number)).astype(np.int64)


def _hashed(values: Iterable[bytes | np.ndarray]) -> str:
    """Return the XXH3 hash of contents and lengths, in hexadecimal."""
    state = xxhash.xxh3_64()
    for value in values:
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.ascontiguousarray(value)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
