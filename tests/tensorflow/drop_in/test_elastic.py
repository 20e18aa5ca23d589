"""Elastic training with horovod_keras under a real horovodrun: a rank is killed, and one joins.

Oracles: the state of the other rank; the epoch and batch at which the rank was killed.
"""

import json
import sys

import pytest
from ranks import REPOSITORY, run

SCRIPT = REPOSITORY / "tests/tensorflow/ranks/keras_elastic.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    """Run the job, and return the events that the ranks printed, in order."""
    directory = tmp_path_factory.mktemp("elastic")
    hosts = directory / "hosts"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")  # two hosts for horovodrun, which leaves out the one that fails
    job = ("-np", 2, "--min-np", 1, "--max-np", 2, "--blacklist-cooldown-range", 1, 2)
    discovery = ("--host-discovery-script", f"cat {hosts}")
    result = run("horovodrun", *job, *discovery, sys.executable, SCRIPT, directory, TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output
    lines = [line.partition(">:")[2] for line in result.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_training_goes_on_without_the_killed_rank_from_its_last_commit(said):
    """The rank was killed before batch 7 of its second epoch, so batch 6 was the last that all ranks committed."""
    alone = [line for line in said if line["size"] == 1]
    assert (alone[0]["event"], alone[0]["epoch"], alone[0]["batch"]) == ("begin", 1, 6)


def test_the_host_is_let_in_again_and_takes_the_state_of_the_others(said):
    begins = [line for line in said if line["event"] == "begin"]
    sizes = [line["size"] for line in begins]
    assert sizes == [2, 2, 1, 2, 2]
    joined, other = begins[-2:]
    assert {**joined, "rank": 0} == {**other, "rank": 0}
    assert (joined["epoch"], joined["batch"]) > (1, 6)


def test_no_epoch_is_left_out_or_counted_twice(said):
    epochs = [line["epoch"] for line in said if line["event"] == "epoch" and line["rank"] == 0]
    assert epochs == list(range(1, len(epochs) + 1))


def test_all_ranks_end_with_the_same_bits(said):
    [one, other] = [line for line in said if line["event"] == "end"]
    assert one["size"] == 2
    assert {**one, "rank": 0} == {**other, "rank": 0}
