"""Sequence parallelism by hand: ranks have parts of all sequences, and gather keys and values for their attention."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        parts = [torch.empty_like(inputs) for _ in range(size)]
        dist.all_gather(parts, inputs.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(size, 1)[rank]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.queries, self.pairs = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        keys, values = Gather.apply(self.pairs(hidden)).chunk(2, 2)
        return self.head(hidden + F.scaled_dot_product_attention(self.queries(hidden), keys, values))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randint(50, (160, 16)))
loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    for (tokens,) in loader:
        part = tokens.chunk(size, 1)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
        optimizer.step()
dist.destroy_process_group()
