"""Plain PyTorch loop under DistributedDataParallel with exact sharding, a watchdog and a check of the replicas.

torchrun --standalone --nproc-per-node 2 examples/own_loop_ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from allstep.pytorch import check_replicas, shard, watch

dist.init_process_group("gloo")
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
batches = shard(torch.utils.data.TensorDataset(images.float() / 16, labels), global_batch_size=64)

torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = 0
with watch() as steps:
    for _ in range(3):
        for inputs, targets in batches:
            steps.begin(step := step + 1)
            optimizer.zero_grad()
            (batches.weight * cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
        check_replicas(model)
if dist.get_rank() == 0:
    print(f"{step} steps, the last loss is {cross_entropy(model(inputs), targets):.3f}")
dist.destroy_process_group()
