"""Imports of users' files. Oracle: what Python imports when it runs each file as a program of its own."""

from __future__ import annotations

import builtins
import os
import posix
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file

PROGRAMS = Path(__file__).parent / "programs"


def function(path: Path, name: str):
    return user_file.import_function(path, name, "--model")


def build(path: Path):
    return user_file.call(function(path, "build"), flag="--model")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Fresh copies of the programs' folders; of `first` a second one, whose modules have other values."""
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "first").rglob("*.py"):
        other = tmp_path / "second" / path.relative_to(tmp_path / "first")
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text(path.read_text().replace('"first', '"second'))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    loaded = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(loaded):
        del sys.modules[name]


def test_each_file_gets_its_own_helpers(folders):
    for name in ("first", "second", "first"):
        expected = name, f"{name}, in a folder", f"{name}, late", [], []
        assert build(folders / name / "mine.py") == expected
        code = "import mine; print(mine.build())"
        alone = subprocess.run([sys.executable, "-c", code], cwd=folders / name, capture_output=True, text=True)
        assert alone.stdout == f"{expected}\n"
    assert sys.argv == ["train.py", "--epochs", "3"]


def test_a_file_that_closes_what_others_have_opened_is_refused_and_a_working_folder_stays(tmp_path):
    closing = """import os
for name in os.listdir("/proc/self/fd"):
    path = "/proc/self/fd/" + name
    if os.path.exists(path) and os.readlink(path) == os.getcwd():
        os.close(int(name))
"""
    (tmp_path / "closes.py").write_text(closing)
    (tmp_path / "moves.py").write_text("import os\nos.chdir('/')\ndef build(): os.chdir('/proc')")
    folder = Path.cwd()
    user_file.call(function(tmp_path / "moves.py", "build"), flag="--model")
    assert Path.cwd() == folder
    with pytest.raises(UserError, match=r"closes.py closes what it did not open, as os.closerange"):
        function(tmp_path / "closes.py", "build")


def test_imports_that_run_later_are_of_the_same_folder(folders):
    late = {name: user_file.call(function(folders / name / "mine.py", "late"), flag="--model") for name in
            ("first", "second")}  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        for name in ("second", "first", "second"):
            expected = f"{name}, late", f"{name}, in a folder"
            assert late[name]() == pool.submit(late[name]).result() == expected


def test_modules_of_others_are_hidden_and_come_back(folders, monkeypatch):
    """A library may have modules with the names of a user's."""
    theirs = {name: ModuleType(name) for name in ("utils", "models", "layers")}
    for name, module in theirs.items():
        module.__file__ = f"/elsewhere/{name}.py"
        monkeypatch.setitem(sys.modules, name, module)
    (folders / "first" / "layers" / "__init__.py").touch()
    assert build(folders / "first" / "mine.py")[:3] == ("first", "first, in a folder", "first, late")
    assert all(sys.modules[name] is module for name, module in theirs.items())


def test_packages_import_relatively(folders):
    for name in ("mine.py", "__init__.py"):
        assert build(folders / "package" / name) == ("head of package", "package.parts")


def test_errors_name_what_was_called_and_the_users_line(folders):
    with pytest.raises(UserError, match=r"expected fails\(\) to return for --model, received ValueError: no network tod"
                                        r"ay in line 32 of .*first/mine.py; fix it"):  # fmt: skip
        user_file.call(function(folders / "first" / "mine.py", "partial"), flag="--model")
    with pytest.raises(UserError, match=r"expected exit\(\) to return for --model, received SystemExit: 0"):
        user_file.call(sys.exit, 0, flag="--model")
    with pytest.raises(SystemExit):  # of output whose reader is gone
        user_file.call(sys.exit, 141, flag="--model")
    (folders / "first" / "quits.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match="received SystemExit(: 0)? in line 2 of .*quits.py; fix it"):  # wandb's says 0
        function(folders / "first" / "quits.py", "build")
    (folders / "first" / "leaves.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(UserError, match="received SystemExit: 0 in line 2 of .*leaves.py; fix it"):
        function(folders / "first" / "leaves.py", "build")
    assert os._exit is posix._exit
    (folders / "first" / "broken.py").write_text("import utils\nimport absent\n")
    with pytest.raises(UserError, match="No module named 'absent'.* in line 2 of .*broken.py"):
        function(folders / "first" / "broken.py", "build")
