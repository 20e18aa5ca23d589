"""Public interface for users' programs: `import allstep`, `from allstep.pytorch import Session`.

This folder and its two subfolders only define names. The code is in common/, pytorch/ and tensorflow/ next to it, which
setup.cfg merges into one package. pytorch/ and tensorflow/ must not have an `__init__.py`, so theirs are here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.common.api import checkpoint as checkpoint
    from allstep.common.api.launch import launch
    from allstep.common.api.load import load
    from allstep.common.base.errors import Fault, UserError
    from allstep.common.base.version import VERSION as __version__
    from allstep.common.training.hooks import Hook, StopTraining

__all__ = ["Fault", "Hook", "StopTraining", "UserError", "__version__", "checkpoint", "launch", "load"]

_PLACES = {
    "Fault": ("base.errors", "Fault"),
    "Hook": ("training.hooks", "Hook"),
    "StopTraining": ("training.hooks", "StopTraining"),
    "UserError": ("base.errors", "UserError"),
    "__version__": ("base.version", "VERSION"),
    "launch": ("api.launch", "launch"),
    "load": ("api.load", "load"),
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: trainers answer --help without them.
    if name == "checkpoint":
        return importlib.import_module("allstep.common.api.checkpoint")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"allstep.common.{module}"), attribute)
