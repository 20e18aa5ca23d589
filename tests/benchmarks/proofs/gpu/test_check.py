"""The table that tools/gpu_check.sh prints, of checks made here; and that the images it trains on are a data set.

Whether the checks themselves run, `tools/gpu_check.sh --device cpu` says, in ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from allstep.benchmarks.harness.measure import BenchmarkFailed, Figure
from allstep.benchmarks.proofs.gpu import check
from allstep.benchmarks.proofs.gpu.effort import ON_CPU
from allstep.benchmarks.proofs.gpu.images import HEIGHT, WIDTH, write_images
from allstep.common.data import datasets
from allstep.common.data.datasets.config import DataConfig

SCRIPT = Path(__file__).resolve().parents[4] / "tools" / "gpu_check.sh"


def one(what: str, ratio: float) -> check.Check:
    return check.Check(what, lambda effort, folder: [Figure(what, ratio, 1, ratio, ">= 1.0")])


def failing(effort, folder):
    raise BenchmarkFailed("its log")


@pytest.fixture
def checks(monkeypatch):
    checks = {"good": one("good", 1.0), "bad": one("bad", 0.9), "broken": check.Check("broken", failing)}
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


def test_what_has_no_time_left_is_missed(checks, tmp_path):
    figures = check.measure(["good"], dataclasses.replace(ON_CPU, seconds=0), tmp_path)
    assert [(figure.what, figure.reached) for figure in figures] == [("good: no time was left", False)]


def test_the_script_lists_every_check():
    result = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(check.CHECKS)


def test_the_images_are_a_data_set(tmp_path):
    write_images(tmp_path, 30)
    dataset = datasets.load(DataConfig(dataset="image-folder", data_dir=tmp_path, image_size=32))
    assert (len(dataset.train), len(dataset.validation), dataset.num_classes) == (30, 10, 10)
    with Image.open(next(tmp_path.glob("train/*/*.jpg"))) as image:
        assert image.size == (WIDTH, HEIGHT)
