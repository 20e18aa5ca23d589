"""`make setup` on machines that lack something: real runs of the real Makefile in a copy of the tree.

Oracles: exit status 2, one line on stderr that names what is missing, and no .venv, so nothing was downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import need

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_PYTHON = os.path.realpath(sys.executable)


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the files that `make setup` needs."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml", *REPOSITORY.glob("constraints*.txt")):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("tools", "common", "commands"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "tools" / "setup_needs.py").open("a") as file:
        file.write("\nPACKAGES_GB = TENSORFLOW_GPU_GB = 0\n")  # this machine may have less room than packages take
    return tmp_path


@pytest.fixture
def bare_path(tmp_path):
    """Return a PATH with the programs that make and the shell script need, and without a compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "make", "dirname"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def make_setup(tree: Path, path: Path | str, **variables: str) -> subprocess.CompletedProcess:
    command = ["make", "setup", *(f"{name}={value}" for name, value in variables.items())]
    env = {"PATH": str(path)}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60)


def assert_one_line(result: subprocess.CompletedProcess, *words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert result.returncode == 2, result
    assert len(lines) == 1, result
    for word in ("make setup:", *words):
        assert word in lines[0], result


def test_no_compiler(tree, bare_path):
    result = make_setup(tree, bare_path, PYTHON=BASE_PYTHON)
    assert_one_line(result, "expected a C++20 compiler", "c++ is not found", "apt-get")
    assert not (tree / ".venv").exists()


def test_a_compiler_that_is_too_old(tree, bare_path):
    for name in ("c++", "cc"):
        script(bare_path / name, "echo 'error: unrecognized command-line option' >&2; exit 1\n")
    result = make_setup(tree, bare_path, PYTHON=BASE_PYTHON)
    assert_one_line(result, "received c++, which cannot compile C++20", "apt-get")
    assert not (tree / ".venv").exists()


def test_no_python(tree, bare_path):
    assert_one_line(make_setup(tree, bare_path), "expected Python 3.10 to 3.13", "received python3, which is missing")


def test_gpu_needs_a_compiler_and_no_toolkit(tree, bare_path):
    """It needs no card either: nvcc comes as a wheel, and a login node may have neither."""
    result = make_setup(tree, bare_path, PYTHON=BASE_PYTHON, GPU="1")
    assert_one_line(result, "expected a C++20 compiler")
    assert ".venv will be for GPUs: GPU=1 says so" in result.stdout
    assert not (tree / ".venv").exists()


def test_an_environment_of_somebody_else_is_left_alone(tree, bare_path):
    (tree / ".venv").mkdir()
    (tree / ".venv" / "precious").touch()
    result = make_setup(tree, bare_path, PYTHON=BASE_PYTHON)
    assert_one_line(result, "expected an environment of make setup", "move it away")
    assert (tree / ".venv" / "precious").exists()


def test_a_cache_that_cannot_be_made(tree):
    result = make_setup(tree, os.environ["PATH"], PYTHON=BASE_PYTHON, XDG_CACHE_HOME=str(tree / "Makefile"))
    assert_one_line(result, "expected files that can be written", str(tree / "Makefile" / "allstep"))


def in_mounts_of_its_own(tree: Path, script: str) -> subprocess.CompletedProcess:
    """Run a shell script in the tree, with mounts that no other process sees."""
    need("unshare", "mount", root=True)
    command = ["unshare", "--mount", "sh", "-ec", script]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)


def test_a_checkout_that_cannot_be_written(tree):
    result = in_mounts_of_its_own(tree, f'mount --bind -o ro . .; cd "$PWD"; make setup PYTHON={BASE_PYTHON}')
    assert_one_line(result, "expected files that can be written", ".venv: Read-only file system")


def test_a_disk_that_filled_after_the_packages_had_come(tree):
    """A set-up that goes on needs room as a fresh one does. A file system of 50 MB stands in for a full disk."""
    record = "import setup_environment as s; s.record(s.fingerprints(s.setup_steps(gpu=False))[:2], gpu=False)"
    script = f"""
        mkdir .venv; mount -t tmpfs -o size=50m none .venv
        (cd tools; {BASE_PYTHON} -c "{record}")
        make setup PYTHON={BASE_PYTHON}
    """
    assert_one_line(in_mounts_of_its_own(tree, script), "expected 1.0 GB of free disk", "received 0.1 GB")


def test_a_package_index_that_does_not_answer(tree):
    """No process listens on port 9 of this machine."""
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    result = make_setup(tree, os.environ["PATH"], PYTHON=BASE_PYTHON, **index)
    assert_one_line(result, "expected a package index that has", "Connection refused", "check the network")
