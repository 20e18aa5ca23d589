"""The optimizers by the names of `--optimizer`. `tensorflow/optimizers` has the same formulas.

torch's own where they are right. timm's Lars, Lamb and NvNovoGrad have the formulas of ours, but not their form: to
import them takes 6 s in every rank, on a CPU their steps take 1.5 to 2.5 times as long as ours, under FSDP they would
take the norm of a shard for that of the weight, and Horovod, which makes an optimizer anew of its parameter groups,
would have Lamb clip at a norm of 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.pytorch.compat import without_compiler


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter], *, fused_sgd: bool = True, sliced: bool = False
) -> torch.optim.Optimizer:
    """The configured optimizer; the engine sets its learning rate before every step.

    It has two groups of parameters: weights with two axes or more, which decay and have trust ratios, and biases and
    the scales of norms, which do not.

    Args:
        fused_sgd: whether one kernel updates many parameters by SGD; else it is as PyTorch chooses for their device.
            Adam and AdamW are always fused, LARS, LAMB and NovoGrad choose themselves, and Adagrad and RMSprop have no
            such kernel on every device.
        sliced: with --slices: no bit of a step may depend on how weights are cut into shards. Kernels that are fused
            for CPUs round the last elements of a tensor otherwise than those before, so that none is used.
    """
    parameters, decay, name = list(parameters), config.weight_decay, config.optimizer
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if name in ("sgd", "nesterov"):
        fused = (fused_sgd and not sliced) or None
        options = {"momentum": config.momentum, "nesterov": name == "nesterov", "fused": fused}
        return without_compiler(torch.optim.SGD)(groups, lr=0.0, **options)
    if name in ("lars", "lamb"):
        groups[0]["layerwise"], groups[1]["layerwise"] = True, False
    if name in ("lars", "lamb", "novograd"):
        for group in groups:
            group["sliced"] = sliced
    if name == "lars":
        from allstep.pytorch.optimizers.lars import Lars

        return without_compiler(Lars)(groups, momentum=config.momentum)
    if name == "lamb":
        from allstep.pytorch.optimizers.lamb import Lamb

        return without_compiler(Lamb)(groups)
    if name == "novograd":
        from allstep.pytorch.optimizers.novograd import NovoGrad

        return without_compiler(NovoGrad)(groups, grad_averaging=config.grad_averaging)
    if name in ("adam", "adamw"):
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        return without_compiler(kind)(groups, lr=0.0, fused=not sliced or None)
    kind = {"adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}[name]
    with torch.device("cpu"):  # there Adagrad counts its steps; on a GPU each step would wait for every weight's count
        return without_compiler(kind)(groups, lr=0.0)
