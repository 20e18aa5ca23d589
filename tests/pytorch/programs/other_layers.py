"""A network whose ranks use layers of one size in turn, from pass NUMBER on; run by test_missing_gradients.py.

python other_layers.py NUMBER
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import nn

from allstep.pytorch import Session


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.num_passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        uses_other = self.num_passes >= int(sys.argv[1]) and os.environ["RANK"] == "1"
        return self.head(torch.tanh((self.other if uses_other else self.one)(inputs)))


inputs = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
samples = (inputs, (inputs[:, 0] > 0).astype(np.int64))
Session(Network(), samples, samples, strategy="fsdp", epochs=3, global_batch_size=8).fit()
