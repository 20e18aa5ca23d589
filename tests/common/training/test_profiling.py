"""Profiles of single steps. Oracles: traces written by hand, and the operators that a worker is known to call."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from numpy_ranks import Job, of

from allstep.commands.report import command as report
from allstep.commands.report.sources import read
from allstep.common.base.errors import UserError
from allstep.common.training.profiling import hooks_of, summarise


def span(name: str, begin: float, duration: float, *, cat: str = "cpu_op", tid: int = 1) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": duration}


BY_HAND = [
    {"ph": "M", "name": "process_name"},
    span("allstep: between steps", 0, 10, cat="user_annotation"),
    span("allstep: step", 10, 40, cat="user_annotation"),
    span("conv", 10, 20),
    span("conv.inner", 12, 5),
    span("allstep: wait for gradients", 40, 10, cat="user_annotation"),
    span("allstep: between steps", 50, 10, cat="user_annotation"),
    span("allstep: step", 60, 40, cat="user_annotation"),
    span("conv", 60, 10),
    # Half of it is in the step, and another thread sends at the same time.
    span("gloo:all_reduce", 90, 20, tid=2),
    span("c10d::allreduce_", 92, 4),
]


def test_shares_and_operators_of_a_trace():
    found = summarise(BY_HAND)
    assert found["seconds"] == pytest.approx(100e-6)
    shares = (found["input"], found["communication"], found["compute"])
    assert shares == pytest.approx((0.2, 0.2, 0.6)) and sum(shares) == pytest.approx(1)
    operators = {one["name"]: (one["calls"], round(1e6 * one["seconds"])) for one in found["operators"]}
    assert operators == {"conv": (2, 25), "gloo:all_reduce": (1, 20), "conv.inner": (1, 5), "c10d::allreduce_": (1, 4)}
    assert next(iter(operators)) == "conv"


def test_kernels_of_a_gpu_are_ranked_where_there_are_any():
    found = summarise([*BY_HAND, span("volta_gemm", 20, 3, cat="kernel", tid=7)])
    assert [one["name"] for one in found["operators"]] == ["volta_gemm"]


def profiled(tmp_path, *flags, steps="2:4", ranks=1):
    """Train in NumPy, with an operation of PyTorch in each step, under PyTorch's profiler."""

    def prepare(run):
        hooks = hooks_of(run.config, run.placement, "pytorch")
        train_step = type(run.worker).train_step

        class Worker(type(run.worker)):
            def train_step(self, *arguments):
                torch.ones(3).cumsum(0)
                return train_step(self, *arguments)

        run.worker.__class__ = Worker
        run.hooks = [*run.hooks, *hooks]
        return run

    job = Job(ranks, "--output-dir", tmp_path, "--log-every", 1, "--profile", steps, *flags, prepare=prepare)
    return job, job.train()


def test_steps_of_a_run_are_traced_and_reported(tmp_path):
    job, events = profiled(tmp_path / "run", "--epochs", 2, "--profile-ranks", 1, ranks=2)
    assert of("step", events, "step") == list(range(1, 9))
    assert [len(run.hooks) for run in job.runs] == [0, 1] and "train_step" not in vars(job.runs[1].worker)
    with gzip.open(tmp_path / "run/profile/rank-1.pt.trace.json.gz", "rt") as stream:
        trace = json.load(stream)["traceEvents"]
    assert sum(event.get("name") == "allstep: step" and event["ph"] == "X" for event in trace) == 3
    result = json.loads((tmp_path / "run/profile/rank-1.json").read_text())
    assert (result["rank"], result["first_step"], result["last_step"]) == (1, 2, 4)
    assert {"aten::cumsum"} <= {one["name"] for one in result["operators"]} and len(result["operators"]) <= 10
    assert result["input"] + result["communication"] + result["compute"] == pytest.approx(1)
    [section] = [one for one in report.build(read([tmp_path])) if one.title.startswith("Profile")]
    assert section.title == "Profile of rank 1: run, steps 2 to 4"
    assert "aten::cumsum" in str(section.tables)


def test_a_resumed_run_and_one_that_ends_profile_what_there_is(tmp_path, capsys):
    profiled(tmp_path, "--epochs", 1, steps="3:7")
    result = json.loads((tmp_path / "profile/rank-0.json").read_text())
    assert (result["first_step"], result["last_step"]) == (3, 4)
    profiled(tmp_path, "--epochs", 2, "--resume", "latest", steps="3:7")
    result = json.loads((tmp_path / "profile/rank-0.json").read_text())
    assert (result["first_step"], result["last_step"]) == (5, 7)
    profiled(tmp_path / "short", "--epochs", 1, steps="10:12")
    assert "the run has no step 10 to 12, which --profile names" in capsys.readouterr().err


def test_mistakes(tmp_path):
    out = ("--output-dir", tmp_path)
    for flags, expected in [
        (("--profile", "1:2"), "expected --output-dir with --profile, received none"),
        ((*out, "--profile", "5:2"), "expected --profile to be FIRST:LAST, steps from 1 on, received 5:2"),
        ((*out, "--profile", "0:2"), "received 0:2; write it as in 10:15"),
        ((*out, "--profile", "\u0661:2"), "received \u0661:2; write it as in 10:15"),
        ((*out, "--profile-ranks", "0"), "--profile-ranks needs --profile, received none"),
    ]:
        with pytest.raises(UserError, match=expected):
            Job(1, *flags)
    with pytest.raises(UserError, match="expected --profile-ranks to be 0 to 0, received 3"):
        profiled(tmp_path, "--profile-ranks", 3)
