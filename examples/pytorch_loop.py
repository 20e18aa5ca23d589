"""Plain PyTorch loop under Horovod, trained on real handwritten digits; five steps turn a serial script into this.

horovodrun -np 2 python examples/pytorch_loop.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

hvd.init()  # 1. initialise: find out rank and world size
has_local_gpu = hvd.local_size() <= torch.cuda.device_count()
device = torch.device("cuda", hvd.local_rank()) if has_local_gpu else torch.device("cpu")
torch.set_num_threads(1)  # 2. one GPU or core per process, chosen by local rank

order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))  # the same on every rank
images, labels = (torch.from_numpy(array)[order].to(device) for array in load_digits(return_X_y=True))
images = images.float() / 16
train = torch.arange(hvd.rank(), 1500, hvd.size())  # each rank trains on its own share
train = train[: 1500 // hvd.size()]  # of equal size: all ranks take the same number of steps

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
# The learning rate is scaled with the size of the global batch.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # 3. average gradients over ranks
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 4. all ranks start with rank 0's values

for _ in range(10):
    for batch in train[torch.randperm(len(train))].split(32):
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()

if hvd.rank() == 0:  # 5. only rank 0 logs and writes
    with torch.no_grad():
        logits = model(images[1500:])
    accuracy = (logits.argmax(1) == labels[1500:]).float().mean()
    print(f"validation loss: {cross_entropy(logits, labels[1500:]):.3f}, validation accuracy: {accuracy:.3f}")
