"""Expert parallelism by hand: each rank has an expert of its own, and calls of the model exchange activations."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        outputs = torch.empty_like(inputs)
        dist.all_to_all_single(outputs, inputs.contiguous())
        return outputs

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.forward(ctx, gradient)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, size)
        self.expert = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, inputs):
        shares = self.gate(inputs).softmax(1).T.unsqueeze(2)
        outputs = self.expert(Exchange.apply(shares * inputs).flatten(0, 1)).view(shares.shape[0], *inputs.shape)
        return inputs + Exchange.apply(outputs).sum(0)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
points = torch.randn(320, 12, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, points[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16 // size, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), Experts(), nn.Linear(16, 4))
torch.manual_seed(rank)
for layer in (model[1].expert[1], model[1].expert[3]):
    layer.reset_parameters()
shared = [weight for name, weight in model.named_parameters() if "expert" not in name]
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for weight in shared:
            dist.all_reduce(weight.grad)
        for weight in model.parameters():
            weight.grad /= size
        optimizer.step()
dist.destroy_process_group()
