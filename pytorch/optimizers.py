"""The optimizers by the names of `--optimizer`. `tensorflow/optimizers.py` has the same formulas."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.pytorch.compat import without_compiler


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """The configured optimizer; the engine sets its learning rate before every step.

    Args:
        fused: whether one kernel updates many parameters; else it is as PyTorch chooses for their device.
    """
    options = {"lr": 0.0, "weight_decay": config.weight_decay, "fused": fused or None}
    if config.optimizer in ("sgd", "nesterov"):
        nesterov = config.optimizer == "nesterov"
        return without_compiler(torch.optim.SGD)(parameters, momentum=config.momentum, nesterov=nesterov, **options)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return without_compiler(kind)(parameters, **options)
