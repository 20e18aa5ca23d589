"""The table that tools/gpu_check.sh prints, of checks made here; and that the images it trains on are a data set.

Whether the checks themselves run, `tools/gpu_check.sh --device cpu` says, in ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image

from allstep.benchmarks.harness.measure import BenchmarkFailed, Figure, run
from allstep.benchmarks.proofs.gpu import check, speed
from allstep.benchmarks.proofs.gpu.effort import ON_CPU
from allstep.benchmarks.proofs.gpu.images import HEIGHT, WIDTH, write_images
from allstep.common.data import datasets
from allstep.common.data.datasets.config import DataConfig

SCRIPT = Path(__file__).resolve().parents[4] / "tools" / "gpu_check.sh"


def one(what: str, ratio: float) -> check.Check:
    return check.Check(what, lambda effort, folder: [Figure(what, ratio, 1, ratio, ">= 1.0")], 1)


def failing(effort, folder):
    raise BenchmarkFailed("its log")


@pytest.fixture
def checks(monkeypatch):
    checks = {"good": one("good", 1.0), "bad": one("bad", 0.9), "broken": check.Check("broken", failing, 1)}
    monkeypatch.setattr(check, "CHECKS", checks)
    return checks


@pytest.mark.parametrize("only, status", [("good", 0), ("good,bad", 1), ("good,broken", 1)])
def test_the_status_is_1_where_a_bound_is_missed(checks, only, status):
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as ended:
        check.main(["--only", only, "--device", "cpu"])
    assert status == (ended.value.code if ended else 0)


def test_a_check_that_fails_is_a_row_and_ends_no_other(checks, tmp_path, capsys):
    figures = check.measure(["broken", "good"], ON_CPU, tmp_path)
    assert [(figure.what, figure.reached) for figure in figures] == [("broken: failed", False), ("good", True)]
    assert math.isnan(figures[0].ratio)
    assert "its log" in capsys.readouterr().err


# What never ends, by each of the ways in which a check waits for something.
HANG = ["sh", "-c", "echo it hangs here; exec sleep 600"]
HANGS = {
    "of a job": lambda effort, folder: run(HANG),
    "of one of two that take turns": lambda effort, folder: speed.rates_in_turn({"hang": HANG}, effort, folder / "it"),
    "of the check itself": lambda effort, folder: time.sleep(600),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_check_that_hangs_is_ended_and_the_others_keep_their_time(checks, tmp_path, capsys, hang):
    checks["hangs"] = check.Check("hangs", HANGS[hang], 0.05)
    figures = check.measure(["hangs", "bad", "good"], dataclasses.replace(ON_CPU, seconds=60), tmp_path)
    assert [figure.reached for figure in figures] == [False, False, True]
    assert re.fullmatch(r"hangs: ended after \d+ s", figures[0].what)
    assert math.isnan(figures[0].ratio)
    printed = capsys.readouterr().err
    assert "good " in printed
    assert hang != "of a job" or "it hangs here" in printed


def test_the_script_lists_every_check():
    result = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(check.CHECKS)


def test_the_images_are_a_data_set(tmp_path):
    write_images(tmp_path, 30)
    dataset = datasets.load(DataConfig(dataset="image-folder", data_dir=tmp_path, image_size=32))
    assert (len(dataset.train), len(dataset.validation), dataset.num_classes) == (30, 10, 10)
    with Image.open(next(tmp_path.glob("train/*/*.jpg"))) as image:
        assert image.size == (WIDTH, HEIGHT)
