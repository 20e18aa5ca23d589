"""Ranks that a user's program starts, loses or ends. Oracles: each sample is trained once; no job hangs."""

import json
import sys

import pytest
from ranks import REPOSITORY, launch, run

import allstep
from allstep.common.api import checkpoint

PROGRAMS = REPOSITORY / "tests/launch/programs"


def test_ranks_that_a_program_spawns_share_the_samples_or_are_refused(tmp_path):
    result = run(sys.executable, PROGRAMS / "spawned_ranks.py", tmp_path)
    assert result.returncode == 0, result.output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(ranks[0]["samples"] + ranks[1]["samples"]) == list(range(10))
    assert checkpoint.load(tmp_path / "checkpoints") == (1, {"rank": 0})
    for rank, found in enumerate(ranks):
        assert "received a process group of 2 ranks, which the program has started itself" in found["session"]
        assert "the ranks of this model have parts" in found["replicas"]
        assert f"received rank {rank} of 2, by the launcher 0 of 1" in found["watch"]


@pytest.mark.cold
def test_the_rank_that_is_left_of_an_elastic_job_trains_all_samples_and_saves(tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    job = ("-np", 2, "--min-np", 1, "--max-np", 2, "--host-discovery-script", f"cat {tmp_path}/hosts")
    result = run("horovodrun", *job, sys.executable, PROGRAMS / "elastic_loop.py", tmp_path / "checkpoints")
    assert result.returncode == 0, result.output
    trained = [line.partition("trained ")[2].split() for line in result.stdout.splitlines() if "trained" in line]
    alone = [int(sample) for size, *samples in trained if size == "1" for sample in samples]
    before = [int(sample) for size, *samples in trained if size == "2" for sample in samples]
    assert len(alone) == len(set(alone)) in (8, 12)  # it goes on after step 2, or after step 1 if that was committed
    assert set(alone) | set(before) == set(range(16))
    saved = checkpoint.load(tmp_path / "checkpoints")
    assert saved and saved[0] == 4


@pytest.mark.launch
def test_a_rank_that_exits_without_a_result_is_told():
    with pytest.raises(allstep.Fault, match="expected all 1 ranks to return, received exit status 0 from horovodrun"):
        allstep.launch(sys.exit, 0, num_ranks=1)


def test_a_rank_whose_hook_ends_the_run_alone_is_told():
    result = launch("mpirun", 2, PROGRAMS / "stopping_alone.py", "horovod")
    assert result.returncode == 1
    assert "rank 0 of 2 on " in result.output and "its run has ended, and the others, which go on," in result.output
