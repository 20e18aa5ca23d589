"""Fixtures for the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import write_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a directory with a result of every kind."""
    write_results(tmp_path)
    return tmp_path
