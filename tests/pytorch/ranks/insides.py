"""Internals of Horovod and Gloo that `pytorch/compat.py` uses; run on two Horovod ranks by test_compat.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist

from allstep.pytorch.compat import all_reduce_handles, gloo_is_busy

NUM_SUMS = 50
MAX_LOOKS = 1000


def check_handles(num_passes: int) -> None:
    """Only the last backward pass starts an all-reduce per parameter; earlier ones accumulate, and a step ends all."""
    network = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        backward_passes_per_step=num_passes,
    )
    for done in range(num_passes):
        assert all_reduce_handles(optimizer) == {}, done
        network(torch.ones(1, 3)).sum().backward()
    handles = all_reduce_handles(optimizer)
    assert sorted(handles) == ["bias", "weight"], handles
    assert all(hvd.poll(handle) in (True, False) for handle in handles.values())
    optimizer.step()
    assert all_reduce_handles(optimizer) == {}


def check_gloo(folder: str) -> None:
    """Gloo's threads are busy while they sum many numbers, and idle when the sums are done."""
    store = dist.FileStore(str(Path(folder, "store")), hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    values, seen = torch.ones(1_000_000), set()
    for _ in range(NUM_SUMS):  # the same number on all ranks
        sum_ = dist.all_reduce(values, async_op=True)
        while not sum_.is_completed():
            seen.add(gloo_is_busy())
        sum_.wait()
    assert True in seen, {Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    for _ in range(MAX_LOOKS):
        if not gloo_is_busy():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("Gloo is busy without work")
    dist.destroy_process_group()


if __name__ == "__main__":
    hvd.init()
    check_handles(1)
    check_handles(2)
    check_gloo(os.environ["FOLDER"])
