"""nn.DataParallel on several devices, as far as one device can show it."""

from __future__ import annotations

import threading

import pytest
import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.pytorch.strategies.data_parallel import DataParallel


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_threads_that_compute_for_a_device_use_the_type_of_autocast(precision):
    """A network's replicas run in new threads, and autocast starts with float16 in each of them."""
    network, strategy = torch.nn.Linear(1, 1), DataParallel(ALONE, StrategyConfig())
    strategy.pin_device()
    strategy.gpu = 0  # pretend that there is a GPU
    model, _ = strategy.wrap(network, torch.optim.SGD(network.parameters(), lr=1))
    torch.set_autocast_dtype("cuda", precision)
    model(torch.zeros(1, 1))
    torch.set_autocast_dtype("cuda", torch.float16)
    seen = {}

    def of_a_device() -> None:
        seen["before"] = torch.get_autocast_dtype("cuda")
        model.module(torch.zeros(1, 1))
        seen["inside"] = torch.get_autocast_dtype("cuda")

    thread = threading.Thread(target=of_a_device)
    thread.start()
    thread.join()
    assert seen == {"before": torch.float16, "inside": precision}
