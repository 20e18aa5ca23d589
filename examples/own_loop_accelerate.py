"""Training loop with Hugging Face's Accelerate and four parts of allstep. Needs `pip install accelerate`.

torchrun --standalone --nproc-per-node 2 examples/own_loop_accelerate.py runs/own-loop
"""

import os
import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from allstep import checkpoint
from allstep.pytorch import check_replicas, shard, watch

has_local_gpu = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
accelerator = Accelerator(cpu=not has_local_gpu)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
batches = shard(torch.utils.data.TensorDataset(images.float() / 16, labels), global_batch_size=64)

torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))  # without batches
step = 0
with watch() as steps:
    for epoch in range(3):
        for inputs, targets in batches:
            steps.begin(step := step + 1)
            optimizer.zero_grad()
            outputs = model(inputs.to(accelerator.device))
            accelerator.backward(batches.weight * cross_entropy(outputs, targets.to(accelerator.device)))
            optimizer.step()
        check_replicas(model, f"after epoch {epoch + 1}")
        checkpoint.save(sys.argv[1], step, {"model": accelerator.unwrap_model(model).state_dict()})
weights = accelerator.unwrap_model(model).weight
accelerator.print(f"{step} steps, weights add up to {weights.double().sum().item():.6f}")
accelerator.end_training()
