"""The table that tools/gpu_check.sh prints, for made-up checks; and the images it trains on form a data set.

`tools/gpu_check.sh --device cpu` runs the real checks, in ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from allstep.benchmarks.gpu import check, speed
from allstep.benchmarks.gpu.effort import ON_CPU, ON_GPU, Effort
from allstep.benchmarks.gpu.exactness import Trial
from allstep.benchmarks.gpu.speed import HEIGHT, WIDTH, write_images
from allstep.commands.shared.measure import BenchmarkFailed, run
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "gpu_check.sh"


def one(what: str, ratio: float) -> check.Check:
    return check.Check(what, lambda effort, folder: [Figure(what, ratio, 1, ratio, ">= 1.0")], 1)


def failing(effort, folder):
    raise BenchmarkFailed("its log")


def trial(*command: str) -> tuple[str, Callable[[Effort, Path], Trial]]:
    return "tried", lambda effort, folder: Trial([command], lambda: [Figure("tried", 1, 1, 1, ">= 1.0")])


@pytest.fixture
def checks(monkeypatch):
    checks = {"good": one("good", 1.0), "bad": one("bad", 0.9), "broken": check.Check("broken", failing, 1)}
    monkeypatch.setattr(check, "CHECKS", checks)
    monkeypatch.setattr(check, "TRIALS", {"tried": trial("true"), "untrue": trial("sh", "-c", "echo why; false")})
    return checks


def test_the_seconds_of_all_checks_fit():
    """The limit is 8 minutes, less the time to end a check that hangs."""
    assert check.TRIALS_SECONDS + sum(one.seconds for one in check.CHECKS.values()) <= ON_GPU.seconds <= 470


@pytest.mark.parametrize("only, status", [("good", 0), ("good,bad", 1), ("good,broken", 1)])
def test_the_status_is_1_where_a_bound_is_missed(checks, only, status):
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as ended:
        check.main(["--only", only, "--device", "cpu"])
    assert status == (ended.value.code if ended else 0)


def test_what_fails_is_a_row_and_ends_no_other(checks, tmp_path, capsys):
    figures = check.measure(["untrue", "broken", "tried", "good"], ON_CPU, tmp_path)
    rows = [("untrue: failed", False), ("tried", True), ("broken: failed", False), ("good", True)]
    assert [(figure.what, figure.reached) for figure in figures] == rows
    assert math.isnan(figures[0].ratio)
    printed = capsys.readouterr().err
    assert "its log" in printed and "why" in printed


# Checks that never end, one for each way in which a check waits.
HANG = ["sh", "-c", "echo it hangs here; exec sleep 600"]
HANGS = {
    "of a job": lambda effort, folder: run(HANG),
    "of the check itself": lambda effort, folder: time.sleep(600),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_check_that_hangs_is_ended_and_the_others_keep_their_time(checks, tmp_path, capsys, hang):
    checks["hangs"] = check.Check("hangs", HANGS[hang], 1)
    left = sum(checks[name].seconds for name in ("bad", "good"))
    figures = check.measure(["hangs", "bad", "good"], dataclasses.replace(ON_CPU, seconds=left + 2), tmp_path)
    assert [figure.reached for figure in figures] == [False, False, True]
    assert re.fullmatch(r"hangs: ended after \d+ s", figures[0].what)
    assert math.isnan(figures[0].ratio)
    printed = capsys.readouterr().err
    assert "good " in printed
    assert hang != "of a job" or "it hangs here" in printed


def test_a_check_for_which_no_time_is_left_is_not_run(checks, tmp_path):
    checks["slow"] = check.Check("slow", failing, 100)
    for name in ("enough", "less"):
        (tmp_path / name).mkdir()
    figures = check.measure(["good", "slow"], dataclasses.replace(ON_CPU, seconds=101), tmp_path / "enough")
    assert [figure.what for figure in figures] == ["good", "slow: failed"]
    figures = check.measure(["slow", "good"], dataclasses.replace(ON_CPU, seconds=30), tmp_path / "less")
    assert [(figure.what, figure.reached) for figure in figures] == [
        ("slow: not run, for there was no time left", False),
        ("good", True),
    ]


def test_one_of_those_that_take_turns_that_hangs_is_a_row(tmp_path, capsys):
    effort = dataclasses.replace(ON_CPU, seconds=2)
    rates = speed.rates_in_turn({"hang": HANG, "fails": ["false"]}, effort, tmp_path / "it")
    assert rates == {} and "it hangs here" in capsys.readouterr().err
    row = speed._figure("speed", {"ours": [1.0]}, "ours", "hang")
    assert row.what == "speed: hang failed" and not row.reached


def test_without_a_gpu_it_is_a_mistake(checks):
    """tests/conftest.py hides the GPUs of the machine."""
    with pytest.raises(UserError, match="expected a GPU, received a machine that shows none; --device cpu"):
        check.main(["--only", "good"])


def test_the_script_lists_every_check():
    result = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == [*check.TRIALS, *check.CHECKS]


def test_the_images_are_a_data_set(tmp_path):
    write_images(tmp_path, 30)
    dataset = datasets.load(DataConfig(dataset="image-folder", data_dir=tmp_path, image_size=32))
    assert (len(dataset.train), len(dataset.validation), dataset.num_classes) == (30, 10, 10)
    with Image.open(next(tmp_path.glob("train/*/*.jpg"))) as image:
        assert image.size == (WIDTH, HEIGHT)
