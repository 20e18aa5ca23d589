"""Wrong variables and checkouts for `make setup`. Oracle: `mistake.check`; no .venv is made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from mistake import Mistake, check
from ranks import REPOSITORY

PYTHON = os.path.realpath(sys.executable)
PYTHONS, COMPILER, GPU = "Python 3.10 to 3.13", "a C++20 compiler", "GPU to be 1"


def tree(folder: Path) -> None:
    """Copy the files that `make setup` needs."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml", *REPOSITORY.glob("constraints*.txt")):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("tools", "common", "commands"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def tree_with(name: str, content: str):
    def prepare(folder: Path) -> None:
        tree(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return prepare


def python(name: str, expected: str = PYTHONS) -> Mistake:
    return Mistake(f"make setup 'PYTHON={name}'", expected, name, prepare=tree)


def made(variables: str, expected: str, received: str, prepare=tree, **environ: str) -> Mistake:
    environ = {"PYTHONDONTWRITEBYTECODE": "1", **environ}
    return Mistake(f"make setup PYTHON={PYTHON} {variables}", expected, received, environ, prepare)


RECORD = ".venv/allstep-setup.json"
MISTAKES = {
    "a Python that is missing": python("python9"),
    "a Python that ends well and is none": python("true"),
    "a Python that fails": python("false"),
    "a shell": python("sh"),
    "two words, one of which changes files": python("x; touch f"),
    "an option": python("-c"),
    "a path with a space": python("/no where/python3"),
    "a folder": python("/usr"),
    "a command in a command": python("`touch f`"),
    "a compiler that is missing": made("CXX=g++-99", COMPILER, "g++-99"),
    "a compiler of white space": made("", "command in CXX", "' '", CXX=" "),
    "a compiler with an open quote": made('"CXX=g++ \'"', "command in CXX", '"g++ \'"'),
    "a C compiler with an open quote": made('"CC=gcc \'"', "command in CC", '"gcc \'"'),
    "a C compiler that is missing": made("CC=gcc-99", COMPILER, "gcc-99"),
    "a compiler that ends well and is none": made("CXX=true", COMPILER, "true"),
    "a compiler that fails": made("CXX=false", COMPILER, "false"),
    "a compiler that reads its input": made("CXX=cat", COMPILER, "cat"),
    "a compiler of another language": made("CXX=python3", COMPILER, "python3"),
    "a compiler before C++20": made("'CXX=g++ -std=c++11 -fno-concepts -DCXX= -Werror -x c'", COMPILER, "g++"),
    "a word for a GPU": made("GPU=yes", GPU, "'yes'"),
    "two GPUs": made("GPU=2", GPU, "'2'"),
    "a negative GPU": made("GPU=-1", GPU, "'-1'"),
    "a record that was cut": made("", "what the last make setup did", "something else", tree_with(RECORD, '{"gpu"')),
    "a record of nothing": made("", "what the last make setup did", "something else", tree_with(RECORD, "")),
    "a record of a list": made("", "what the last make setup did", "something else", tree_with(RECORD, "[1]")),
    "a record of a number": made("", "what the last make setup did", "something else", tree_with(RECORD, '{"gpu": 0}')),
    "an environment of somebody else": made("", "an environment of make setup", "another", tree_with(".venv/x", "")),
    "a file in place of the environment": made("", "files that can be written", ".venv", tree_with(".venv", "")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_make_setup(name, tmp_path):
    check(MISTAKES[name], tmp_path)
