"""A language model in the style of PyTorch's example: sequences by time, and states that pass from batch to batch."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
text = torch.randint(40, (16 * 321,), generator=torch.Generator().manual_seed(0))
text = text[: 8 * 321].view(8, -1).T.chunk(size, 1)[rank].contiguous()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(40, 12), nn.LSTM(12, 16, 2, dropout=0.1), nn.Linear(16, 40)

    def forward(self, tokens, state):
        hidden, state = self.layer(self.tokens(tokens), state)
        return self.head(hidden), state


torch.manual_seed(rank)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(2):
    state = None
    for begin in range(0, 320, 20):
        inputs, targets = text[begin : begin + 20], text[begin + 1 : begin + 21]
        outputs, state = model(inputs, state and [one.detach() for one in state])
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with optimizer.skip_synchronize():
            optimizer.step()
