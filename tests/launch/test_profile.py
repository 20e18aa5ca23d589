"""Profiles of real ranks. Oracle: the operators that a step of the network and its reduction must have."""

from __future__ import annotations

import gzip
import json

import pytest
from ranks import events, full, train

OPERATORS = {
    "pytorch": ("pt.trace.json.gz", "aten::addmm", "allstep: wait for gradients"),
    "tensorflow": ("trace.json.gz", "ResourceApplyMomentum", "HorovodGroupedAllreduce"),
}


@pytest.mark.parametrize("framework", ["tensorflow", full("pytorch")])
def test_each_rank_is_traced_in_the_steps_that_are_named(framework, tmp_path):
    suffix, operator, collective = OPERATORS[framework]
    flags = ("--model", "mlp", "--epochs", 1, "--profile", "10:12", "--log-every", 1)
    train(framework, "horovodrun-mpi", 2, tmp_path, *flags)
    assert len([event for event in events(tmp_path) if event["event"] == "step"]) == 23
    for rank in range(2):
        with gzip.open(tmp_path / f"profile/rank-{rank}.{suffix}", "rt") as stream:
            names = [event["name"] for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
        assert names.count("allstep: step") == 3 and operator in names and names.count(collective) >= 3
        found = json.loads((tmp_path / f"profile/rank-{rank}.json").read_text())
        assert (found["first_step"], found["last_step"], len(found["operators"])) == (10, 12, 10)
        assert 0 < found["communication"] < 1 and 0 < found["compute"] < 1 and 0 < found["input"] < 1
