"""Runs the scripts of tests/tensorflow/ranks on two real ranks, and reads the results of their cases."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import REPOSITORY, launch

SCRIPTS = REPOSITORY / "tests" / "tensorflow" / "ranks"


def run_on_two_ranks(launcher: str, script: str, directory: Path, *words: str) -> None:
    """Run a script that writes into `directory`; it must succeed."""
    result = launch(
        launcher, 2, SCRIPTS / "lean.py", SCRIPTS / script, directory, *words, TF_CPP_MIN_LOG_LEVEL="2", timeout=600
    )
    assert result.returncode == 0, result.output


def behaviour_of(directory: Path, *files: str) -> list[dict]:
    """Return for each rank a dict from the names of the cases in these files to their results."""
    run_on_two_ranks("horovodrun-mpi", "keras_behaviour.py", directory, *files)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


def same(behaviour: list[dict], case: str):
    """Return the result of a case, which must be the same on both ranks."""
    assert behaviour[0][case] == behaviour[1][case]
    return behaviour[0][case]
