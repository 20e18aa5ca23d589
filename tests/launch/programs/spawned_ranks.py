"""Ranks that a program starts by torch.multiprocessing.spawn: what allstep's components take them for."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from allstep import UserError, checkpoint
from allstep.pytorch import Session, check_replicas, shard, watch

FOLDER = Path(sys.argv[1])


def refusal(call):
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=rank, world_size=2)
    samples = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) % 2)
    found = {"samples": [int(x) for inputs, _ in shard(samples, 4) for x in inputs]}
    checkpoint.save(FOLDER / "checkpoints", 1, {"rank": rank})
    found["session"] = refusal(lambda: Session(torch.nn.Linear(1, 2), samples, epochs=1, batch_size=2).fit())
    found["watch"] = refusal(lambda: watch().__enter__())
    found["replicas"] = refusal(lambda: check_replicas(fully_shard(torch.nn.Linear(2, 2))))
    (FOLDER / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, nprocs=2)
