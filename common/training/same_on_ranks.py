"""Comparison of what ranks were started with and what they read, before they build a network.

Ranks with other flags would wait for each other without end, and ranks with other data would train on a mixture.
"""

import json
from collections.abc import Mapping

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.exact.replica_check import digest
from allstep.common.launch.env_launcher import check_same_flags, first_difference
from allstep.common.training.data_digest import digests_of
from allstep.common.training.earlier_run import resolve_auto
from allstep.common.training.start import flags_of


def agreed(config: TrainConfig, collectives: Collectives) -> TrainConfig:
    """Compare the flags of all ranks, and return them with --resume auto resolved (see `resolve_auto`).

    Raises UserError if a flag is not the same on all ranks.
    """
    check_same_flags(_gathered(flags_of(config), collectives))
    return resolve_auto(config, collectives)


def check_same_data(dataset: Dataset, collectives: Collectives) -> None:
    """Refuse data sets that are not the same on all ranks."""
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
