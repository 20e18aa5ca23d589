"""Loop under hvd.elastic.run with `shard` and `checkpoint`, whose rank 0 is lost after two of its four steps."""

import os
import signal
import sys

import horovod.torch as hvd
import torch

from allstep import checkpoint
from allstep.common.data.sharding import Position
from allstep.pytorch import shard

hvd.init()
state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), step=0, position=Position(0, 0))
batches = shard(torch.utils.data.TensorDataset(torch.arange(16)), 4)


@hvd.elastic.run
def train(state):
    batches.position = state.position
    for (samples,) in batches:
        hvd.allreduce(torch.zeros(1), name="gradient")
        state.step, state.position = state.step + 1, batches.position
        print("trained", hvd.size(), *samples.tolist(), flush=True)
        checkpoint.save(sys.argv[1], state.step, {"samples": samples})
        state.commit()
        if hvd.size() == 2 and hvd.rank() == 0 and state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
