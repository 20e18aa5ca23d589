"""The optimizers by the names of `--optimizer`. `tensorflow/optimizers.py` has the same formulas."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch

from allstep.common.config.train_config import OptimizerConfig


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
        return _without_compiler(torch.optim.SGD)(parameters, momentum=config.momentum, nesterov=nesterov, **options)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return _without_compiler(kind)(parameters, **options)


def _without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, by methods that torch has not wrapped for torch.compile.

    The wrappers import the compiler when they are called first: 1.9 of the 4.8 s of CPU that a rank takes to start.
    Nothing is compiled here.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    # Its wrapper also switches gradients off.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)
