"""The optimizers by the names of `--optimizer`. `tensorflow/optimizers.py` has the same formulas."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.pytorch.compat import without_compiler


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The configured optimizer; the engine sets its learning rate before every step."""
    decay = config.weight_decay
    if config.optimizer in ("sgd", "nesterov"):
        return without_compiler(torch.optim.SGD)(
            parameters, lr=0.0, momentum=config.momentum, weight_decay=decay, nesterov=config.optimizer == "nesterov"
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return without_compiler(kind)(parameters, lr=0.0, weight_decay=decay)
