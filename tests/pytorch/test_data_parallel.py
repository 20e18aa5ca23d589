"""nn.DataParallel on several devices, as far as that can be seen on one."""

from __future__ import annotations

import threading

import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.pytorch.strategies.data_parallel import DataParallel


def test_threads_that_compute_for_a_device_use_bfloat16():
    """A network's copies run in new threads, in each of which autocast begins with float16."""
    network, strategy = torch.nn.Linear(1, 1), DataParallel(ALONE, StrategyConfig())
    strategy.pin_device()
    model, _ = strategy.wrap(network, torch.optim.SGD(network.parameters(), lr=1))
    seen = {}

    def of_a_device() -> None:
        seen["before"] = torch.get_autocast_dtype("cuda")
        model.module(torch.zeros(1, 1))
        seen["inside"] = torch.get_autocast_dtype("cuda")

    thread = threading.Thread(target=of_a_device)
    thread.start()
    thread.join()
    assert seen == {"before": torch.float16, "inside": torch.bfloat16}
