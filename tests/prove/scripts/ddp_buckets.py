"""Batches of sentences of similar length, by a batch sampler of the script's own."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(2, 12, (260,), generator=generator).tolist()
        self.sentences = [torch.randn(length, 6, generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return self.sentences[index], self.sentences[index].sum()


class Buckets(Sampler):
    def __init__(self, lengths, batch_size, rank, size):
        self.lengths, self.batch_size, self.rank, self.size, self.epoch = lengths, batch_size, rank, size, 0

    def _batches(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        random.Random(self.epoch).shuffle(batches)
        batches = batches[: len(batches) - len(batches) % self.size]
        return batches[self.rank :: self.size]

    def __iter__(self):
        return iter(self._batches())

    def __len__(self):
        return len(self._batches())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 12)
        self.head = nn.Linear(12, 1)

    def forward(self, packed):
        _, (hidden, _) = self.layer(packed)
        return self.head(hidden[-1]).squeeze(1)


def collate(items):
    sentences, sums = zip(*items, strict=False)
    return pack_sequence(sentences, enforce_sorted=False), torch.stack(sums)


dist.init_process_group("gloo")
data = Sentences()
buckets = Buckets(data.lengths, 10, dist.get_rank(), dist.get_world_size())
loader = DataLoader(data, batch_sampler=buckets, collate_fn=collate)
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.NAdam(model.parameters(), 1e-3)

for epoch in range(3):
    buckets.epoch = epoch
    for packed, sums in loader:
        loss = nn.functional.smooth_l1_loss(model(packed), sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
