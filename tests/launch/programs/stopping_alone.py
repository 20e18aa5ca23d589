"""Session of which one rank alone ends the run: its hook looks at something that the other rank does not see."""

import sys

import numpy as np
import torch

import allstep
from allstep.common.launch.placement import find_placement
from allstep.pytorch import Session


class Stop(allstep.Hook):
    def on_epoch(self, session) -> None:
        if find_placement().rank == 0:
            raise allstep.StopTraining


samples = np.zeros((64, 4), np.float32), np.arange(64) % 2
Session(torch.nn.Linear(4, 2), samples, epochs=2, hooks=[Stop()], stall_timeout=5, strategy=sys.argv[1]).fit()
