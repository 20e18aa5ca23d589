"""Audit of --audit: in a share of steps, a second rank computes each slice again, and the bits are compared.

Some processors silently compute wrong results now and then (Hochschild et al. 2021, "Cores that don't count"; Dixit et
al. 2021, "Silent Data Corruptions at Scale"). With --slices, the vector of a slice (its loss, its gradients, its batch
norms' statistics) has the same bits on every rank. So the next rank computes it again from the same weights and
samples, before weights change. If the 64-bit digests of the two differ, the rank after that computes it a third time,
and the rank that differs from the other two is wrong.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.data.loader import Batch
from allstep.common.data.slices import local_slices


class UnequalBits(Exception):
    """Error that names the ranks that computed different bits, and the slice."""


def audited_steps(share: float | None, *, seed: int, epoch: int) -> Callable[[int], bool] | None:
    """Return a function that tells whether the step at an offset of an epoch is audited, the same on all ranks.

    Returns None if `share` is None.
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
    """Compare the slices of all ranks with the results of other ranks for them; all ranks call it.

    Raises UnequalBits, on every rank, if any two digests differ.

    Args:
        batch: this rank's batch in an audited step.
        digests: 64-bit digests of the vectors of its slices, by slice number.
        compute: computes the digests of the slices of another rank's batch.
    """
    rank, world_size = collectives.rank, collectives.world_size
    owners = np.array([owner for owner in range(world_size) for _ in local_slices(owner, world_size, num_slices)])

    def answers(*found: Mapping[int, int], first: int) -> np.ndarray:
        """Gather digests (rows, slices): row i is by the rank that comes `first` + i ranks after a slice's owner."""
        rows = np.zeros((len(found), num_slices), np.int64)
        for row, own in zip(rows, found, strict=True):
            row[list(own)] = list(own.values())
        distances = np.arange(len(found))[:, np.newaxis]
        ranks = (owners + first + distances) % world_size
        gathered = collectives.all_gather(rows.ravel()).reshape(world_size, *rows.shape)
        return gathered[ranks, distances, np.arange(num_slices)]

    def computed(distance: int, numbers: np.ndarray) -> Mapping[int, int]:
        """Return digests of slices of the rank that is `distance` ranks before this one."""
        assert batch.read_slice_of
        other = batch.read_slice_of((rank - distance) % world_size)
        # A single rank with several devices computes each slice on a different device than before.
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
    """Describe which rank computed a slice wrongly; `opinions` are the digests of its owner and of the next ranks."""
    if world_size == 1:
        return f"rank 0 computed slice {number} twice, with different bits"
    ranks = [(owner + distance) % world_size for distance in range(len(opinions))]
    alone = [rank for rank, opinion in zip(ranks, opinions, strict=True) if opinions.count(opinion) == 1]
    if len(alone) == 1:
        others = " and ".join(str(rank) for rank in ranks if rank not in alone)
        return f"rank {alone[0]} computes slice {number} with other bits than ranks {others}; look at its host"
    names = ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
    return f"ranks {names} compute slice {number} with different bits, and no other rank says which of them is right"
