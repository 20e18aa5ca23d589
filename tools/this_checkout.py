"""Make allstep.* importable from this checkout by an interpreter in which allstep is not installed.

`make setup` runs by any Python, and may not use another allstep that is installed there.
"""

import sys
import types
from pathlib import Path

_package = types.ModuleType("allstep")
_package.__path__ = [str(Path(__file__).resolve().parent.parent)]
sys.modules.setdefault("allstep", _package)
