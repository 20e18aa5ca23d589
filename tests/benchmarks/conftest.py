"""What tests of reports start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import write_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory with a result of every kind."""
    write_results(tmp_path)
    return tmp_path
