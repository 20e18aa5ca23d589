"""What a program of the user's own imports: `import allstep`, `from allstep.pytorch import Session`.

This folder and the two in it hold nothing but names. The code is in common/, pytorch/ and tensorflow/ beside it,
which setup.cfg puts into one package; pytorch/ and tensorflow/ themselves must have no `__init__.py`, so it is here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.common import own_checkpoint as checkpoint
    from allstep.common.launch.from_python import launch

__all__ = ["checkpoint", "launch"]



def __getattr__(name: str) -> Any:
    # Imported when asked for: trainers answer --help without them.
    if name == "checkpoint":
        return importlib.import_module("allstep.common.own_checkpoint")
    if name == "launch":
        return importlib.import_module("allstep.common.launch.from_python").launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
