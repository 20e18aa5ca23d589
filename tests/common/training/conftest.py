import threading

import pytest
from undisturbed_runs import undisturbed  # noqa: F401  # a fixture

from allstep.common.process import exit


@pytest.fixture(autouse=True)
def no_failure_noted(monkeypatch):
    """A run that fails notes that its process is about to end; this one goes on."""
    monkeypatch.setattr(exit, "_failed", threading.Event())
