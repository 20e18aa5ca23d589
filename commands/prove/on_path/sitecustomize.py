"""Python imports this when it starts, where this folder is on its path: in the ranks of a script that is looked at."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from allstep.commands.prove.observer.start import start

start()
# The environment may have a module of this name itself, whose place this one has taken.
_here = Path(__file__).parent
if _spec := PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path) != _here]):
    assert _spec.loader
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
