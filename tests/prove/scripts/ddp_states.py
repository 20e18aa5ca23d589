"""An LSTM under DistributedDataParallel whose state goes from batch to batch, as in PyTorch's word language model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
text = torch.randint(40, (2 * 2001,), generator=torch.Generator().manual_seed(0))
text = text.view(size, -1)[rank]
columns = text[: len(text) // 8 * 8].view(8, -1).T


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(40, 16), nn.LSTM(16, 16, 2, dropout=0.1), nn.Linear(16, 40)

    def forward(self, tokens, state):
        outputs, state = self.lstm(self.embedding(tokens), state)
        return self.head(outputs), state


model = DistributedDataParallel(Language())
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1 * size)
state = torch.zeros(2, 8, 16), torch.zeros(2, 8, 16)
for begin in range(0, 240, 6):
    state = tuple(one.detach() for one in state)
    outputs, state = model(columns[begin : begin + 6], state)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), columns[begin + 1 : begin + 7].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
dist.destroy_process_group()
