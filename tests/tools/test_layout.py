"""The layout that the import names rest on (ARCHITECTURE.md)."""

from __future__ import annotations

import configparser
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("pytorch", "tensorflow")


def python_files(framework: str) -> set[str]:
    return {path.name for path in (REPOSITORY / framework).glob("*.py")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_init_at_the_top(framework):
    """With the repository root on the path, tensorflow/__init__.py would be imported as tensorflow."""
    assert not (REPOSITORY / framework / "__init__.py").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_file_bears_a_package_s_name(framework):
    """`python tensorflow/train.py` puts tensorflow/ first on the path: a horovod.py there would be it."""
    taken = set(importlib.metadata.packages_distributions()) | sys.stdlib_module_names
    names = {path.stem for path in (REPOSITORY / framework).glob("*.py")}
    names |= {path.parent.name for path in (REPOSITORY / framework).glob("*/__init__.py")}
    assert not names & taken


def test_both_frameworks_have_the_same_files():
    """But for the drop-in: Keras under Horovod needs what PyTorch has from Horovod itself."""
    drop_in = {name for name in python_files("tensorflow") if name.startswith("horovod_")}
    assert python_files("pytorch") == python_files("tensorflow") - drop_in


def test_both_frameworks_have_horovod_and_single():
    for framework in FRAMEWORKS:
        for name in ("__init__.py", "horovod.py", "single.py"):
            assert (REPOSITORY / framework / "strategies" / name).exists()


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {
        "allstep." + ".".join(path.parent.relative_to(REPOSITORY).parts)
        for top in ("common", "pytorch", "tensorflow", "benchmarks")
        for path in (REPOSITORY / top).rglob("*.py")
    }
    assert listed == found


def ruff(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    command = [str(Path(sys.prefix, "bin", "ruff")), "check", "--select", "TID251", "--no-cache", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, input=stdin, capture_output=True, text=True)


def test_common_imports_no_framework():
    result = ruff("common")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_help_is_there_without_numpy(framework):
    """It takes 0.1 s, of every mistake in a flag too."""
    command = [sys.executable, "-X", "importtime", f"{framework}/train.py", "--help"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "allstep.common.flags" in imported
    assert not imported & {"numpy", "torch", "tensorflow"}


@pytest.mark.parametrize("module", ["torch", "tensorflow", "keras", "horovod.torch"])
def test_the_guard_of_common_works(module):
    program = f"def f():\n    import {module}\n"
    assert ruff("--stdin-filename", "common/example.py", "-", stdin=program).returncode == 1
    assert ruff("--stdin-filename", "pytorch/example.py", "-", stdin=program).returncode == 0
