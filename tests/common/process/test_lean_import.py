"""The garbage collector skips objects that were created while a framework was imported, but not later ones."""

from __future__ import annotations

import sys

from ranks import run

SCRIPT = """
import gc, sys
from allstep.common.process.lean_import import uncollected

before = gc.get_freeze_count()
with uncollected():
    assert not gc.isenabled()
    import decimal
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen > before
sys.modules["torch"] = decimal  # as if it had been imported
with uncollected():
    assert gc.isenabled()
    made_later = [[] for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() <= frozen
"""


def test_a_framework_is_not_collected_and_what_comes_later_is():
    result = run(sys.executable, "-c", SCRIPT)
    assert result.returncode == 0, result.output
