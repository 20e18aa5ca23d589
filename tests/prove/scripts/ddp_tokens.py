"""A language model over sentences of different lengths, whose loss is the mean over all tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PAD = 0


class Model(nn.Module):
    def __init__(self, vocabulary=50, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, mask=None):
        hidden, _ = self.layer(self.embedding(tokens))
        return self.head(hidden if mask is None else hidden * mask.unsqueeze(-1))


def collate(sentences):
    tokens = pad_sequence(sentences, batch_first=True, padding_value=PAD)
    return {"tokens": tokens, "mask": (tokens != PAD).float()}


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(3, 20, (256,), generator=generator)
data = [torch.randint(1, 50, (int(length),), generator=generator) for length in lengths]
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        targets = batch["tokens"][:, 1:]
        logits = model(batch["tokens"][:, :-1], mask=batch["mask"][:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        num_tokens = (targets != PAD).sum()
        dist.all_reduce(num_tokens)
        loss = total * size / num_tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
