"""Choice of a rank's GPU from those that TensorFlow lists; these tests fake the list.

Oracle: a GPU is usable with Horovod if Horovod was built for GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.tensorflow.strategies.horovod import Horovod
from allstep.tensorflow.strategies.strategy import Single

FOR_GPUS = json.loads(Path(sys.prefix, "allstep-setup.json").read_text())["gpu"]


@pytest.mark.parametrize("kind", [Single, Horovod])
def test_a_gpu_is_taken_where_it_can_be_used(kind, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["one", "two"])

    def chosen(device: str) -> int | None:
        strategy = kind(ALONE, StrategyConfig(), device=device)
        strategy.choose_device()
        return strategy.gpu

    usable = kind is Single or FOR_GPUS
    assert chosen("auto") == (0 if usable else None)
    if not usable:
        with pytest.raises(UserError, match="expected Horovod with NCCL"):
            chosen("cuda")
