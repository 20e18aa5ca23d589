"""--audit: in a share of steps each slice is computed by a second rank, and the bits are compared.

Some processors compute wrongly now and then, and nothing says so (Hochschild et al. 2021, "Cores that don't count";
Dixit et al. 2021, "Silent Data Corruptions at Scale"). With --slices the vector of a slice (its loss, its gradients,
its batch norms' statistics) has the same bits on every rank. So the next rank computes it again from the same weights
and samples, before weights change. Where 64 bits of the two differ, the rank after that computes it a third time, and
who is alone with its bits is the one that is wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from allstep.common.collectives import Collectives
from allstep.common.data.loader import Batch
from allstep.common.slices import own_slices


class UnequalBits(Exception):
    """The ranks and the slice of which they have computed different bits."""


def audited_steps(share: float | None, *, seed: int, epoch: int) -> Callable[[int], bool] | None:
    """Whether the step that starts at an offset of an epoch is one of the share; the same on all ranks.

    None where `share` is.
    """
    if share is None:
        return None

    def audited(offset: int) -> bool:
        drawn = hashlib.blake2b(f"audit {seed} {epoch} {offset}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") < share * 2**64

    return audited


def audit(
    batch: Batch,
    digests: Mapping[int, int],
    compute: Callable[[Batch], Mapping[int, int]],
    collectives: Collectives,
    num_slices: int,
) -> None:
    """Compare the slices of all ranks with what other ranks make of them; all ranks call it.

    Args:
        batch: this rank's, of a step that is audited.
        digests: 64 bits of the vector of each of its slices, by number.
        compute: computes those of the slices of another rank's batch.

    Raises:
        UnequalBits: on every rank, where any two differ.
    """
    rank, world_size = collectives.rank, collectives.world_size
    owners = np.array([owner for owner in range(world_size) for _ in own_slices(owner, world_size, num_slices)])

    def answers(*found: Mapping[int, int], first: int) -> np.ndarray:
        """For each slice, a row of digests by the rank so many ranks after its owner, and one by each next rank."""
        rows = np.zeros((len(found), num_slices), np.int64)
        for row, own in zip(rows, found, strict=True):
            row[list(own)] = list(own.values())
        distances = np.arange(len(found))[:, np.newaxis]
        ranks = (owners + first + distances) % world_size
        gathered = collectives.all_gather(rows.ravel()).reshape(world_size, *rows.shape)
        return gathered[ranks, distances, np.arange(num_slices)]

    def computed(distance: int, numbers: np.ndarray) -> Mapping[int, int]:
        """Digests of the slices of the rank so many ranks before this one."""
        assert batch.read_slice_of
        other = batch.read_slice_of((rank - distance) % world_size)
        # One rank with several devices computes each slice on another one.
        slices = [one for one in (*other.slices[1:], other.slices[0]) if one.number in numbers]
        return compute(dataclasses.replace(other, slices=slices))

    both = answers(digests, computed(1, np.arange(num_slices)), first=0)
    disputed = np.flatnonzero(both[0] != both[1])
    if not disputed.size:
        return
    opinions = both if world_size < 3 else np.concatenate([both, answers(computed(2, disputed), first=2)])
    first, *others = disputed
    more = f"; and {len(others)} more of {num_slices} slices" if others else ""
    raise UnequalBits(_verdict(int(first), opinions[:, first].tolist(), int(owners[first]), world_size) + more)


def _verdict(number: int, opinions: list[int], owner: int, world_size: int) -> str:
    """Who is alone with its bits of a slice, of which `opinions` are those of its owner and of the ranks after it."""
    if world_size == 1:
        return f"rank 0 computed slice {number} twice, with different bits"
    ranks = [(owner + distance) % world_size for distance in range(len(opinions))]
    alone = [rank for rank, opinion in zip(ranks, opinions, strict=True) if opinions.count(opinion) == 1]
    if len(alone) == 1:
        others = " and ".join(str(rank) for rank in ranks if rank not in alone)
        return f"rank {alone[0]} computes slice {number} with other bits than ranks {others}; look at its host"
    names = ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
    return f"ranks {names} compute slice {number} with different bits, and no other rank says which of them is right"
