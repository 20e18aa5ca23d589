"""Fixtures that observe scripts; each correct script is observed once on one rank, for comparison with several."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm_start
from prove_corpus import SCRIPTS, launcher_of
from requirements import need_packages

from allstep.commands.prove import launching
from allstep.commands.prove.launching import ITSELF, Script
from allstep.commands.prove.observer.observer import Settings
from allstep.commands.prove.observer.start import environment
from allstep.commands.prove.runs import Run

NUM_STEPS = 4
_PACKAGES = {"ddp_accelerated": ["accelerate"], "ddp_split_batches": ["accelerate"], "ddp_lightning": ["lightning"]}
"""Optional packages that scripts of the corpus need."""


@pytest.fixture(scope="session")
def observe(tmp_path_factory) -> Iterator[Callable[[Path, str, int], Run]]:
    """Yield a function that observes a script, of a family of the corpus, in an empty folder."""

    def run(path: Path, family: str, num_ranks: int) -> Run:
        need_packages(*_PACKAGES.get(family, ()))
        before = os.getcwd()
        os.chdir(tmp_path_factory.mktemp("prove"))
        try:
            return Script(path, (), launcher_of(family), NUM_STEPS, 300).observe(num_ranks)
        finally:
            os.chdir(before)

    def variables(settings: Settings) -> dict[str, str]:
        observed = environment(settings)
        others = [one for one in observed["PYTHONPATH"].split(os.pathsep) if one != str(warm_start.FOLDER)]
        return {**observed, **warm_start.path(*others)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "environment", variables)
        yield run


@pytest.fixture(scope="session")
def alone(observe) -> Callable[[str], Run | None]:
    """Return a function that observes a correct script on one rank, or returns None if it starts its ranks itself."""

    @functools.cache
    def run(family: str) -> Run | None:
        return None if launcher_of(family) == ITSELF else observe(SCRIPTS / f"{family}.py", family, 1)

    return run
