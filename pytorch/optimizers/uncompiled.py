"""torch's optimizers without the compiler, which they would import for nothing."""

from __future__ import annotations

import inspect

import torch


def without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, by methods that torch has not wrapped for torch.compile.

    The wrappers import the compiler when they are called first: 1.9 of the 4.8 s of CPU that a rank takes to start.
    Nothing is compiled here.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    # Its wrapper also switches gradients off.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)
