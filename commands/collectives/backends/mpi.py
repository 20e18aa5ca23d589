"""MPI itself, through mpi4py: the best that Horovod on MPI can reach; and a copy, the lower bound of all times."""

import numpy as np
from mpi4py import MPI

from allstep.commands.collectives.backends import Operation


class Memcpy:
    """A copy of the buffer on every rank, at the same time on all of them; nothing is sent."""

    def __init__(self) -> None:
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def copy(self, array: np.ndarray) -> Operation:
        received = np.empty_like(array)
        return Operation(lambda: np.copyto(received, array), lambda: received)


class Mpi:
    """Collectives of MPI.COMM_WORLD; all-reduce is in place, as Horovod reduces gradients."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def all_reduce(self, array: np.ndarray) -> Operation:
        buffer = array.copy()
        return Operation(lambda: self._world.Allreduce(MPI.IN_PLACE, buffer), lambda: buffer)

    def all_gather(self, array: np.ndarray) -> Operation:
        received = np.empty(self.size * len(array), array.dtype)
        return Operation(lambda: self._world.Allgather(array, received), lambda: received)

    def broadcast(self, array: np.ndarray) -> Operation:
        buffer = array.copy()
        return Operation(lambda: self._world.Bcast(buffer), lambda: buffer)

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        received = np.empty(len(array) // self.size, array.dtype)
        return Operation(lambda: self._world.Reduce_scatter_block(array, received), lambda: received)

    def all_to_all(self, array: np.ndarray) -> Operation:
        received = np.empty_like(array)
        return Operation(lambda: self._world.Alltoall(array, received), lambda: received)
