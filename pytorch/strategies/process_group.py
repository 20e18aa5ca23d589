"""Parts that the strategies of torch.distributed share: rendezvous of the ranks, and the engine's collectives."""

import atexit
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

# Documented there, though torch forgets to export them.
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import rendezvous as env_rendezvous  # pyright: ignore[reportPrivateImportUsage]

from allstep.common.base.collectives import as_bytes
from allstep.common.launch import rendezvous
from allstep.common.launch.devices import check_agreement
from allstep.common.launch.placement import SPAWN_LISTENER, SPAWN_PORT, Placement
from allstep.pytorch.compat import all_gather, gloo_is_busy
from allstep.pytorch.strategies.ordered_sum import Exchange, Wait
from allstep.pytorch.strategies.strategy import Strategy

_MOMENT_SECONDS = 0.01


class ProcessGroup(Strategy):
    """Ranks that form torch's default process group: Gloo between CPUs, NCCL between GPUs, MPI where torch has it."""

    def init(self) -> None:
        self.choose_device()
        if not dist.is_initialized():  # by an earlier run of the program
            self._form()
        self.collectives = ProcessGroupCollectives(self.placement.rank, self.placement.world_size)

    def _form(self) -> None:
        if self.placement.launcher == "mpirun" and dist.is_mpi_available() and self.gpu is None:
            dist.init_process_group("mpi")
        else:
            _choose_interface(self.placement)
            rank, world_size, store = self.placement.rank, self.placement.world_size, self._store()
            check_agreement(_count_on_gpus(store, self.placement, on_gpu=self.gpu is not None), self.placement)
            # The engine's collectives use Gloo in the host's memory, next to NCCL for gradients on GPUs.
            backend, device = "gloo", None
            if self.gpu is not None:
                backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", self.gpu)
            # Given its device, NCCL connects the ranks now instead of in the first step, and uses no other GPU.
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
        atexit.register(_leave)

    def _store(self) -> Store:
        """Return the store in which ranks leave their addresses for each other."""
        if self.placement.launcher == "torchrun":  # its agent has one
            store, _, _ = next(env_rendezvous("env://", self.placement.rank, self.placement.world_size))
            return store
        if self.placement.world_size == 1:
            return HashStore()
        host, port, listener = _meet(self.placement)
        # An open socket, so that no other process can take the port meanwhile.
        listener = listener.detach() if listener else None
        is_master = self.placement.rank == 0
        return TCPStore(host, port, self.placement.world_size, is_master, master_listen_fd=listener)

    def sum_over_ranks(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        dist.all_reduce(tensor)  # the group distinguishes sums by their order, not by `name`
        return tensor

    def _broadcast_bytes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            dist.broadcast(tensor, 0)

    def _exchange(self) -> Exchange | None:
        return ProcessGroupExchange() if self.placement.world_size > 1 else None

    def versions(self) -> dict[str, str]:
        return {"backend": dist.get_backend()}


@dataclass(frozen=True)
class ProcessGroupCollectives:
    """Collectives of torch's default process group, in the host's memory."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = field(default=None, kw_only=True)
    """Group of the same ranks to use if the default one only communicates between GPUs."""

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        sums = torch.from_numpy(values.copy())
        dist.all_reduce(sums, group=self.group)
        return sums.numpy()

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        gathered = torch.empty((self.world_size, *values.shape), dtype=torch.int64)
        dist.all_gather(list(gathered), torch.from_numpy(values), group=self.group)
        return gathered.numpy()

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        received = {name: np.array(array, order="C") for name, array in arrays.items()}
        for array in received.values():
            dist.broadcast(torch.from_numpy(as_bytes(array)), root, group=self.group)
        return received

    def barrier(self) -> None:
        self.all_reduce_sum(np.zeros(1))  # dist.barrier would pick a GPU


class ProcessGroupExchange:
    """Exchange of the gradients of slices; see `ordered_sum.Exchange`. The group matches calls by their order."""

    keeps_order = False
    """Gloo goes round in a ring, and NCCL chooses."""

    def all_to_all(self, sent: torch.Tensor, received_sizes: list[int], number: int) -> Wait:
        received = sent.new_empty(sum(received_sizes))
        sent_sizes = [sent.numel() // len(received_sizes)] * len(received_sizes)
        return _wait_for(dist.all_to_all_single(received, sent, received_sizes, sent_sizes, async_op=True), received)

    def all_gather(self, part: torch.Tensor, number: int) -> Wait:
        gathered = part.new_empty(part.numel() * dist.get_world_size())
        return _wait_for(all_gather(gathered, part, async_op=True), gathered)

    def all_reduce(self, vector: torch.Tensor, number: int) -> Wait:
        return _wait_for(dist.all_reduce(vector, async_op=True), vector)


def _wait_for(work: dist.Work | None, result: torch.Tensor) -> Wait:
    def wait() -> torch.Tensor:
        assert work  # this rank is in the group
        work.wait()
        return result

    return wait


def _count_on_gpus(store: Store, placement: Placement, *, on_gpu: bool) -> int:
    """Return how many ranks have chosen a GPU, since NCCL would wait for all of them."""
    store.add("allstep/on-gpus", int(on_gpu))
    if store.add("allstep/ranks", 1) == placement.world_size:
        store.set("allstep/all-there", "")
    store.wait(["allstep/all-there"])
    return store.add("allstep/on-gpus", 0)


def _leave() -> None:
    """Leave the group once its threads are idle.

    DDP keeps the threads of Gloo alive to the end (torch 2.14). A thread that drops its last tensor while Python shuts
    down would wait for Python in vain and abort the process.
    """
    dist.destroy_process_group()
    time.sleep(_MOMENT_SECONDS)  # lets a thread through that waits for Python
    while gloo_is_busy():
        time.sleep(_MOMENT_SECONDS)


def _meet(placement: Placement) -> tuple[str, int, socket.socket | None]:
    """Return host and port of rank 0, and on rank 0 the socket that listens there."""
    if placement.launcher == "allstep":
        listener = socket.socket(fileno=int(os.environ[SPAWN_LISTENER])) if placement.rank == 0 else None
        return "127.0.0.1", int(os.environ[SPAWN_PORT]), listener
    if placement.rank:
        host, _, port = rendezvous.all_gather("", placement)[0].rpartition(":")
        return host, int(port), None
    host = rendezvous.local_host(placement)
    listener = socket.create_server((host if _on_one_host(placement) else "", 0), backlog=placement.world_size)
    port = listener.getsockname()[1]
    rendezvous.all_gather(f"{host}:{port}", placement)
    return host, port, listener


def _choose_interface(placement: Placement) -> None:
    """Set Gloo's network interface. By default it is that of the host's name, which may be public or unreachable."""
    if _on_one_host(placement):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif "HOROVOD_GLOO_IFACE" in os.environ:  # horovodrun has found out which one all hosts share
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])


def _on_one_host(placement: Placement) -> bool:
    return placement.local_size == placement.world_size
