"""Module that Python imports at start-up if this folder is on its path, as in the ranks of an observed script."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from allstep.commands.prove.observer.start import start

start()
# The environment may have its own module of this name, which this one shadows.
_here = Path(__file__).parent
if _spec := PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path) != _here]):
    assert _spec.loader
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
