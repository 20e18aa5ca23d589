"""Early stopping on a loss that all ranks agree on, with the best weights reloaded at the end."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.count, self.state = patience, float("inf"), 0, None

    def __call__(self, loss, model):
        if loss < self.best:
            self.best, self.count, self.state = loss, 0, copy.deepcopy(model.state_dict())
        else:
            self.count += 1
        return self.count >= self.patience


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(288, 10, generator=generator)
    targets = torch.randn(288, 1, generator=generator)
    data, validation = TensorDataset(points[:192], targets[:192]), TensorDataset(points[192:], targets[192:])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    validation_loader = DataLoader(validation, 16, sampler=DistributedSampler(validation, shuffle=False))
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-2)
    stopping = EarlyStopping(patience=1)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, outputs in loader:
            loss = F.mse_loss(model(inputs), outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for inputs, outputs in validation_loader:
                total += F.mse_loss(model(inputs), outputs)
        total /= len(validation_loader)
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if stopping(total.item(), model):
            break
    model.load_state_dict(stopping.state)
    if rank == 0:
        print(f"stopped after epoch {epoch}, best {stopping.best:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
