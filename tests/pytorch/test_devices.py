"""Choice of a rank's GPU from those that PyTorch counts; these tests fake the counts.

Oracle: a GPU is usable if CUDA can be initialised on it and, with Horovod, if Horovod was built for GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.pytorch.strategies.horovod import Horovod
from allstep.pytorch.strategies.strategy import Single

FOR_GPUS = json.loads(Path(sys.prefix, "allstep-setup.json").read_text())["gpu"]


def chosen(kind: type, *, works: bool, device: str, monkeypatch) -> int | None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # NVML's count, which works with any driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    strategy = kind(ALONE, StrategyConfig(), device=device)
    strategy.choose_device()
    return strategy.gpu


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("kind", [Single, Horovod])
def test_a_gpu_is_taken_where_it_can_be_used(kind, works, monkeypatch):
    usable = works and (kind is Single or FOR_GPUS)
    assert chosen(kind, works=works, device="auto", monkeypatch=monkeypatch) == (0 if usable else None)
    assert chosen(kind, works=works, device="cpu", monkeypatch=monkeypatch) is None
    if not usable:
        with pytest.raises(UserError, match="received"):
            chosen(kind, works=works, device="cuda", monkeypatch=monkeypatch)
