"""Plain PyTorch loop under Horovod with four parts of allstep, each of which is useful by itself.

horovodrun -np 2 python examples/own_loop_horovod.py
"""

import sys

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from allstep import checkpoint
from allstep.pytorch import check_replicas, shard, watch

hvd.init()
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
dataset = torch.utils.data.TensorDataset(images.float() / 16, labels)
batches = shard(dataset, global_batch_size=64, seed=0)  # the same order on any number of ranks

torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"
step, state = checkpoint.load(folder, as_array=torch.from_numpy) or (0, None)
if state:  # resumes at the exact sample, also on another number of ranks
    model.load_state_dict(state["model"])
    batches.position = type(batches.position)(*state["position"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

with watch() as steps:  # a rank that dies or hangs ends the job with a report
    while batches.position.epoch < 3:
        for inputs, targets in batches:
            if not steps.begin(step := step + 1):
                sys.exit(0)
            optimizer.zero_grad()
            (batches.weight * cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
            if step % 10 == 0:
                position = [batches.position.epoch, batches.position.offset]
                checkpoint.save(folder, step, {"model": model.state_dict(), "position": position})
        check_replicas(model, f"after epoch {batches.position.epoch}")  # raises an error unless ranks are bitwise equal
if hvd.rank() == 0:
    print(f"{step} steps, weights add up to {model.weight.double().sum().item():.6f}")
