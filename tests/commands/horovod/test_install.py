"""`allstep horovod install` that fails. Oracle: the packages of a real environment before and after."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

PROGRAM = """
import sys
from pathlib import Path
from unittest.mock import patch
from allstep.commands.horovod import install
from allstep.commands.horovod.target import Target

target = Target(python=Path(sys.executable), site_packages=Path(), versions={})
wheel = Path(sys.argv[1])
with patch.multiple(
    install,
    check_no_foreign_horovod=lambda: None,
    _check_environment=lambda: None,
    _target=lambda mpi, gpu: target,
    _wheel=lambda target: wheel,
    _lacking=lambda target: ["--no-index", "--find-links", str(wheel.parent), "newcomer"],
):
    install.install(mpi="auto", gpu=None)
"""


def wheel(folder: Path, name: str, version: str) -> Path:
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, without compiled ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize("before", [None, "0.28.1+allstep.1.p9.cpu"])
def test_a_failed_self_test_leaves_the_environment_as_it_was(before, tmp_path):
    """The wheel is no Horovod, so its self-test fails; what came with it goes, too, and an earlier Horovod returns."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if before:
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--no-index", "--ignore-installed"]
        subprocess.run([*pip, wheel(tmp_path, "horovod", before)], check=True)
    files = files_of(packages)
    wheel(tmp_path, "newcomer", "1.0")
    horovod = wheel(tmp_path, "horovod", "0.28.1+allstep.1.p0.cpu")
    python = environment / "bin" / "python"
    result = subprocess.run([python, "-c", PROGRAM, horovod], capture_output=True, text=True)
    assert "[3/3] self-test on two ranks" in result.stdout, result
    assert "CommandFailed" in result.stderr
    assert files_of(packages) == files
