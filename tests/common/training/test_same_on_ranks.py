"""Ranks with other flags or other data. Oracle: the line that names both."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy_ranks import Group, ThreadCollectives

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.config.data_config import DataConfig
from allstep.common.data.formats.python_file import as_dataset
from allstep.common.launch.placement import ALONE
from allstep.common.training.same_on_ranks import agreed, check_same_data


def on_ranks(function, *given) -> list[str]:
    """Call `function` with each of `given` on a rank of its own, and return what each raises."""
    group = Group(len(given))

    def call(rank: int) -> str:
        try:
            function(given[rank], ThreadCollectives(group, rank, len(given)))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(call, range(len(given))))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--epochs 2", "--epochs 3"), "--epochs 2 on rank 0 and 3 on rank 1"),
        (("", "--output-dir a"), "--output-dir none on rank 0 and a path on rank 1"),
        (("--output-dir a --resume auto", "--output-dir a --resume latest"), "--resume auto on rank 0 and latest"),
        (("--batch-ramp 1:2", "--batch-ramp 1:4"), '--batch-ramp ["1:2"] on rank 0 and ["1:4"] on rank 1'),
        (("--output-dir a --data-dir x", "--output-dir b --data-dir y --decode-threads 3"), ""),
    ],
)
def test_flags(flags, said):
    configs = [parse(("single",), ALONE, words.split()) for words in flags]
    for line in on_ranks(agreed, *configs):
        assert said in line
        assert bool(line) == bool(said)


INPUTS, LABELS = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2


@pytest.mark.parametrize(
    ("inputs", "labels", "said"),
    [
        (INPUTS, LABELS, ""),
        (INPUTS, 1 - LABELS, "another digest of the training labels on rank 1"),
        (INPUTS + 1, LABELS, "another digest of the training inputs on rank 1"),
        (INPUTS[:10], LABELS[:10], "another number of training samples on rank 1 (10) than on rank 0 (20)"),
        (INPUTS[:, :1], LABELS, "another shape of samples on rank 1 ((1,)) than on rank 0 ((2,))"),
    ],
)
def test_data(inputs, labels, said):
    first = as_dataset((INPUTS, LABELS), (INPUTS, LABELS), DataConfig(), where="the samples")
    other = as_dataset((inputs, labels), (inputs, labels), DataConfig(), where="the samples")
    for line in on_ranks(check_same_data, first, other):
        assert said in line
        assert bool(line) == bool(said)
    assert on_ranks(check_same_data, dataclasses.replace(first, num_classes=3), first)[0].count("number of classes")
