"""Observe PyTorch: its optimizers, models, loaders and collectives, each by a separate file."""

import multiprocessing
import sys

import torch

from allstep.commands.prove.observer import pytorch_collectives, pytorch_data, pytorch_models, pytorch_optimizers
from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.observer.pytorch_optimizers import Optimizers
from allstep.commands.prove.observer.pytorch_wrappers import Wrappers
from allstep.commands.prove.observer.start import hook_modules
from allstep.common.launch.placement import apparent_rank


def install(observer: Observer) -> None:
    """Hook torch, which has been imported."""
    seed_by_rank()
    wrappers = Wrappers()
    models = pytorch_models.install(observer, wrappers)
    optimizers = pytorch_optimizers.install(observer, models, wrappers)
    pytorch_data.install(observer)
    pytorch_collectives.install(observer, wrappers, optimizers)
    hook_modules(observer, pytorch_collectives.hooks(observer, wrappers, optimizers))
    installed[:] = [(optimizers, wrappers)]


def seed_by_rank() -> None:
    """Give rank 0 the weights of the run on one rank, unless the script seeds, and other ranks others.

    The rank of a process that torch.multiprocessing.spawn has started is not known yet: it draws its own seed. While it
    imports the script, it has no parent_process() either.
    """
    if multiprocessing.parent_process() is None and "--multiprocessing-fork" not in sys.orig_argv:
        torch.manual_seed(apparent_rank())


installed: list[tuple[Optimizers, Wrappers]] = []
"""Observers of optimizers and wrappers, which those of Horovod need."""
