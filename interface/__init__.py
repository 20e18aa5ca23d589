"""Public interface for users' programs: `import allstep`, `from allstep.pytorch import Session`.

This folder and its two subfolders only define names. The code is in common/, pytorch/ and tensorflow/ next to it, which
setup.cfg merges into one package. pytorch/ and tensorflow/ must not have an `__init__.py`, so theirs are here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.common.api import checkpoint as checkpoint
    from allstep.common.api.launch import launch
    from allstep.common.api.load import load

__all__ = ["checkpoint", "launch", "load"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: trainers answer --help without them.
    if name == "checkpoint":
        return importlib.import_module("allstep.common.api.checkpoint")
    if name in ("launch", "load"):
        return getattr(importlib.import_module(f"allstep.common.api.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
