"""Network for --model in which ALLSTEP_PLANTED="STEP RANK LAYER" flips a bit of one gradient."""

import os

import torch
from torch import nn


def build(shape, classes):
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes)
    )
    step, rank, layer = map(int, os.environ.get("ALLSTEP_PLANTED", "0 0 1").split())
    if rank == int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)):
        calls = []

        def flip(gradient):
            calls.append(None)
            if len(calls) == step:
                gradient = gradient.clone()
                gradient.view(torch.int32)[0] ^= 1 << 20
            return gradient

        network[layer].bias.register_hook(flip)
    return network
