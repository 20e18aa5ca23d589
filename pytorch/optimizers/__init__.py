"""Optimizers by the names of `--optimizer`. `tensorflow/optimizers` has the same formulas.

They are torch's own where these have the formulas. timm's Lars, Lamb and NvNovoGrad have them, too, but importing them
takes 6 s in every rank, on a CPU their steps take 1.5 to 2.5 times as long, under FSDP they would use the norm of a
shard instead of the weight's, and under Horovod, which builds an optimizer again from its parameter groups, Lamb would
clip at a norm of 1.
"""

from collections.abc import Iterable, Set

import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OptimizerConfig
from allstep.pytorch.compat import sgd_step, without_compiler
from allstep.pytorch.kept.network_state import can_train
from allstep.pytorch.optimizers.layerwise import Lamb, Lars, Muon, NovoGrad


def embeddings_of(network: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the weights of embeddings, which Muon leaves to AdamW."""
    embeddings = (module for module in network.modules() if isinstance(module, torch.nn.Embedding))
    return {parameter for module in embeddings for parameter in module.parameters(recurse=False)}


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter], embeddings: Set[torch.nn.Parameter] = frozenset()
) -> torch.optim.Optimizer:
    """Return the configured optimizer; the engine sets its learning rate before every step.

    It has two groups of parameters: weights with two axes or more, which decay and have trust ratios, and biases and
    the scales of norms, which do not. One kernel updates many parameters, except for Adagrad and RMSprop, which lack
    such a kernel on some devices.
    """
    parameters, decay, name = [one for one in parameters if can_train(one)], config.weight_decay, config.optimizer
    is_complex = any(one.is_complex() for one in parameters)  # fused kernels do not take them
    if is_complex and name in _FOR_REAL:
        raise UserError(f"--optimizer {name} takes no complex weights; give --optimizer adamw")
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if name in ("sgd", "nesterov"):
        options = {"momentum": config.momentum, "nesterov": name == "nesterov", "fused": not is_complex}
        return without_compiler(SGD)(groups, lr=0.0, **options)
    if name in ("lars", "lamb"):
        groups[0]["layerwise"], groups[1]["layerwise"] = True, False
    if name == "lars":
        return without_compiler(Lars)(groups, momentum=config.momentum)
    if name == "lamb":
        return without_compiler(Lamb)(groups)
    if name == "novograd":
        return without_compiler(NovoGrad)(groups, grad_averaging=config.grad_averaging)
    if name == "muon":
        matrices = {one for one in parameters if one.ndim == 2} - embeddings
        layers = groups[0].pop("params")
        groups[:1] = [
            {**groups[0], "params": [one for one in layers if one in matrices], "are_matrices": True},
            {**groups[0], "params": [one for one in layers if one not in matrices]},
        ]
        return without_compiler(Muon)(groups)
    if name in ("adam", "adamw"):
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        return without_compiler(kind)(groups, lr=0.0, fused=not is_complex)
    kind = {"adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}[name]
    with torch.device("cpu"):  # there Adagrad counts its steps; on a GPU each step would wait for every weight's count
        return without_compiler(kind)(groups, lr=0.0)


_FOR_REAL = ("lars", "lamb", "novograd")


def check_parameters(optimizer: torch.optim.Optimizer, network: torch.nn.Module) -> None:
    """Raise UserError if an optimizer has parameters of another network."""
    known = set(network.parameters())
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("the optimizer has parameters that are not the model's; give it those of the model")


class SGD(torch.optim.SGD):
    """torch's SGD, whose fused kernel also takes weights that had no gradient in the steps before."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        sgd_step(self)


def without_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer use PyTorch's default kernels for the device of its weights."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = None


def with_whole_norms(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer of the suite gather shards of weights before it computes norms."""
    for group in optimizer.param_groups:
        if "sliced" in group:
            group["sliced"] = True
