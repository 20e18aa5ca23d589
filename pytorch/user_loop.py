"""Tools for custom PyTorch training loops with Horovod or DDP; `tensorflow/user_loop.py` has those for TensorFlow.

from allstep.pytorch import check_replicas, shard, watch
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allstep.common.api import user_loop
from allstep.common.api.user_loop import Order, Shard, Steps
from allstep.common.base.collectives import Collectives, OneRank
from allstep.common.base.errors import UserError
from allstep.common.exact.replica_check import check_replicas_equal
from allstep.common.launch.unclaimed_ranks import current_ranks, process_group
from allstep.pytorch.compat import takes_cpu_tensors
from allstep.pytorch.kept.network_state import as_array


def shard(
    dataset: torch.utils.data.Dataset[Any],
    global_batch_size: int,
    *,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Shard:
    """Return this rank's batches of a map-style data set, in an order that is the same for any number of ranks.

    Args:
        global_batch_size: samples per step over all ranks.
        drop_last: leave out the last samples of an epoch if they do not fill a global batch.
        options: arguments of the `DataLoader` that reads them: num_workers, pin_memory, collate_fn, ...

    Raises:
        UserError: `dataset` is not map-style, there are no samples, or see `sharding.check`.
    """
    if isinstance(dataset, tuple) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UserError(
            f"expected a map-style data set to shard, with __getitem__ and __len__, received {type(dataset).__name__}; "
            "pass TensorDataset(inputs, targets) for tensors, loader.dataset for a DataLoader"
        )

    def read(indices: Iterator[np.ndarray]) -> Iterator[Any]:
        batches = [batch.tolist() for batch in indices]
        yield from torch.utils.data.DataLoader(dataset, batch_sampler=batches, **options)

    num_samples = len(dataset)  # pyright: ignore[reportArgumentType]
    return Shard(Order(num_samples, global_batch_size, seed=seed, drop_last=drop_last), read)


def watch(*, stall_timeout: float = 10.0, fault_timeout: float = 30.0) -> contextlib.AbstractContextManager[Steps]:
    """See `common.api.user_loop.watch`; call it after `hvd.init()` or `init_process_group()`."""
    return user_loop.watch(_collectives(), stall_timeout=stall_timeout, fault_timeout=fault_timeout)


def check_replicas(model: torch.nn.Module, moment: str = "") -> None:
    """Compare the weights of all ranks bit by bit; all ranks call it.

    Raises:
        UserError: the ranks keep parts of the weights, under FSDP or as DTensors.
        Fault: weights differ; the message names the ranks and the first weight.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()) or any(
        hasattr(parameter, "to_local") for parameter in model.parameters()
    ):
        raise UserError("check_replicas compares whole weights, and the ranks of this model have parts; leave it out")
    parameters = ((name, as_array(parameter)) for name, parameter in model.named_parameters())
    check_replicas_equal(parameters, _collectives(), moment or "where check_replicas is called")


def _collectives() -> Collectives:
    """Return the collectives of the library that the program has initialised."""
    if ranks := process_group():
        from allstep.pytorch.strategies.process_group import ProcessGroupCollectives

        group = None if takes_cpu_tensors() else _gloo_group(dist.group.WORLD)
        return ProcessGroupCollectives(*ranks, group=group)
    if "horovod.torch" in sys.modules and sys.modules["horovod.torch"].is_initialized():
        from allstep.pytorch.strategies.horovod import HorovodCollectives

        horovod = sys.modules["horovod.torch"]
        return HorovodCollectives(horovod.rank(), horovod.size())
    if current_ranks()[1] > 1:
        raise UserError(
            "expected hvd.init() or torch.distributed.init_process_group() before, received neither; call one of them"
        )
    return OneRank()


@functools.cache
def _gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a Gloo group of the ranks of `world`, which may support only NCCL; all ranks call it."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group
