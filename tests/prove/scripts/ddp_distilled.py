"""Distillation under DistributedDataParallel: batches are dictionaries, and a teacher follows the student.

Gradients are accumulated under no_sync, also those at the end of an epoch, scaled by a GradScaler, and clipped.
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATED = 4


class Texts(Dataset):
    def __init__(self, size, seed):
        self.ids = torch.randint(0, 50, (size, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"attention_mask": torch.ones(12), "input_ids": ids, "labels": (ids > 24).sum() // 4}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, attention_mask, input_ids, labels=None):
        logits = self.head((self.embed(input_ids) * attention_mask[..., None]).mean(1))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels.clamp(max=3))}


def validate(model, loader):
    model.eval()
    correct = torch.tensor(0.0)
    with torch.no_grad():
        for batch in loader:
            correct += (model(**batch)["logits"].argmax(1) == batch["labels"]).sum()
    dist.all_reduce(correct)
    model.train()
    return correct


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = Texts(384, 0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    other = Texts(64, 1)
    other_loader = DataLoader(other, batch_size=8, sampler=DistributedSampler(other, shuffle=False))
    torch.manual_seed(0)
    network = Network()
    teacher = copy.deepcopy(network).eval()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold_mode="abs")
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.tensor(0.0)
        for number, batch in enumerate(loader, 1):
            with torch.no_grad():
                target = teacher(**batch)["logits"]
            is_last = number % ACCUMULATED == 0 or number == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                output = model(**batch)
                loss = output["loss"] + nn.functional.mse_loss(output["logits"], target)
                scaler.scale(loss / ACCUMULATED).backward()
            total += loss.detach()
            if is_last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                with torch.no_grad():
                    for old, new in zip(teacher.parameters(), network.parameters(), strict=True):
                        old.lerp_(new, 0.1)
        correct = validate(model, other_loader)
        dist.all_reduce(total)
        scheduler.step(float(total))
        if rank == 0:
            print(f"epoch {epoch}: loss {float(total) / size:.3f}, {int(correct)} correct")


if __name__ == "__main__":
    main()
