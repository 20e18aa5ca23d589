"""Training from a program of the user's own, in PyTorch. `tensorflow/session.py` has the same for Keras.

    from allstep.pytorch import Session
    history = Session(model, (x, y), (x_val, y_val), optimizer="adam", epochs=5).fit()

The same program runs alone and under horovodrun, mpirun, srun and torchrun.
"""

from typing import Any

import torch

from allstep.common.api.session import TRIED, BaseSession, flags_of_optimizer
from allstep.common.api.user_parts import check_kind
from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OWN_OPTIMIZER
from allstep.pytorch import strategies
from allstep.pytorch.train import session

_NAMES = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
}
"""Optimizers of torch whose state has the canonical names, and their names in `--optimizer`."""
_FOR_SLOTS = ("momentum", "nesterov", *TRIED)
"""Options that decide which state an optimizer keeps, or whether it can step; they may differ between groups."""


def flags_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the flags that describe an optimizer of torch, as far as the run uses them.

    Raises UserError if it is not an optimizer, or has a scheduler, since the run sets learning rates.
    """
    check_kind(optimizer, torch.optim.Optimizer)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            f"expected {type(optimizer).__name__} without a scheduler, whose learning rates the run would replace; "
            "leave the scheduler out, and give lr_decay and warmup_epochs"
        )
    groups, defaults = optimizer.param_groups, optimizer.defaults
    if any("lr" not in group for group in groups):
        raise UserError(f"expected an optimizer with a learning rate lr, received {type(optimizer).__name__}; add it")
    are_alike = all(group.get(name) == defaults.get(name) for group in groups for name in _FOR_SLOTS)
    kind = _NAMES.get(type(optimizer), OWN_OPTIMIZER) if are_alike else OWN_OPTIMIZER
    return flags_of_optimizer(kind, [float(group["lr"]) for group in groups], defaults.get)


class Session(BaseSession):
    """A run of the user's own model on the user's own data; `fit` trains."""

    _strategies, _session, _flags_of = strategies, staticmethod(session), staticmethod(flags_of)
