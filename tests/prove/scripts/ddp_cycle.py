"""A Wasserstein GAN between two domains, with a loader for each, and judges whose weights are clamped."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
horses = TensorDataset(torch.randn(240, 8, generator=generator))
zebras = TensorDataset(torch.randn(320, 8, generator=generator) * 2 + 1)
horse_sampler, zebra_sampler = DistributedSampler(horses), DistributedSampler(zebras)
horse_loader = DataLoader(horses, 8, sampler=horse_sampler, drop_last=True)
zebra_loader = DataLoader(zebras, 8, sampler=zebra_sampler, drop_last=True)


def mlp(outputs):
    return DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs)))


torch.manual_seed(0)
forth, back, horse_judge, zebra_judge = mlp(8), mlp(8), mlp(1), mlp(1)
makers = torch.optim.Adam(itertools.chain(forth.parameters(), back.parameters()), 1e-3, betas=(0.5, 0.999))
judges = torch.optim.RMSprop(itertools.chain(horse_judge.parameters(), zebra_judge.parameters()), 1e-3)

for epoch in range(3):
    horse_sampler.set_epoch(epoch)
    zebra_sampler.set_epoch(epoch)
    for (horse,), (zebra,) in zip(horse_loader, zebra_loader, strict=False):
        for judge in (horse_judge, zebra_judge):
            judge.requires_grad_(False)
        striped, plain = forth(horse), back(zebra)
        adversarial = -zebra_judge(striped).mean() - horse_judge(plain).mean()
        cycle = (back(striped) - horse).abs().mean() + (forth(plain) - zebra).abs().mean()
        makers.zero_grad()
        (adversarial + 10 * cycle).backward()
        makers.step()
        for judge in (horse_judge, zebra_judge):
            judge.requires_grad_(True)
        judges.zero_grad()
        loss = horse_judge(plain.detach()).mean() - horse_judge(horse).mean()
        loss = loss + zebra_judge(striped.detach()).mean() - zebra_judge(zebra).mean()
        loss.backward()
        judges.step()
        with torch.no_grad():
            for parameter in (*horse_judge.parameters(), *zebra_judge.parameters()):
                parameter.clamp_(-0.1, 0.1)
