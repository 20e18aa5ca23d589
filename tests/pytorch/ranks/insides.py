"""What `pytorch/compat.py` uses of Horovod and of Gloo, on two ranks of Horovod by test_compat.py."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist

from allstep.pytorch.compat import all_reduce_handles, gloo_is_busy

DEADLINE_TRIES = 200


def check_handles(num_passes: int) -> None:
    """Each backward pass but the last only adds up; the last starts an all-reduce a parameter, and a step ends them."""
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
    """Its threads are busy while they sum many numbers, and at rest when the sums are there."""
    store = dist.FileStore(str(Path(folder, "store")), hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    names = {Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert "pt_gloo_runloop" in names, names
    values = torch.ones(4_000_000)
    sums = [dist.all_reduce(values, async_op=True) for _ in range(8)]
    assert any(gloo_is_busy() for _ in range(DEADLINE_TRIES))
    for one in sums:
        one.wait()
    assert any(not gloo_is_busy() for _ in range(DEADLINE_TRIES))
    dist.destroy_process_group()


if __name__ == "__main__":
    hvd.init()
    check_handles(1)
    check_handles(2)
    check_gloo(os.environ["FOLDER"])
