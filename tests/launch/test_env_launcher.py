"""Ranks started manually with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Oracle: torchrun's curve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import losses
from ranks import BIN, REPOSITORY, Result, events, free_port, full, last, run

FLAGS = ("--epochs", "1", "--global-batch-size", "32")
PYTORCH = (REPOSITORY / "pytorch" / "train.py", *FLAGS)
TENSORFLOW = (REPOSITORY / "tensorflow" / "train.py", *FLAGS)


def by_hand(*flags: str | Path, prefixes: Sequence[Sequence[str]] = ((), ()), **extra: str) -> list[Result]:
    """Start two ranks, rank 1 first, each with its command prefix, and return their results by rank."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), **extra}
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, *prefixes[rank], sys.executable, *flags, RANK=str(rank), **world) for rank in (1, 0)]
        return [rank.result() for rank in reversed(ranks)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[dict]:
    output_dir = tmp_path_factory.mktemp("torchrun")
    flags = (*PYTORCH, "--strategy", "ddp", "--output-dir", output_dir, "--log-every", "1")
    result = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *flags)
    assert result.returncode == 0, result.output
    return events(output_dir)


@pytest.mark.cold
@pytest.mark.parametrize(
    ("trainer", "strategy"),
    [(PYTORCH, "ddp"), full(PYTORCH, "fsdp"), (TENSORFLOW, "multi-worker-mirrored")],
)
def test_they_train_together(trainer, strategy, reference, tmp_path):
    # Rank 1 loses its parent at once, as after a shell's `&`, which must not count as a lost launcher.
    prefixes = ((), ("sh", "-c", '"$@" & sleep 0.1', "sh"))
    flags = ("--strategy", strategy, "--output-dir", tmp_path, "--log-every", "1")
    first, other = by_hand(*trainer, *flags, prefixes=prefixes)
    assert (first.returncode, other.output) == (0, ""), first.output + other.output
    assert first.stdout.startswith("Epoch =  1:")
    found = events(tmp_path)
    assert (last(found, "start")["launcher"], last(found, "start")["world_size"]) == ("env://", 2)
    assert losses(found) == pytest.approx(losses(reference), rel=1e-6 if strategy == "ddp" else 1e-4)
    if strategy == "ddp":
        assert last(found, "end")["weights_checksum"] == last(reference, "end")["weights_checksum"]


@pytest.mark.full
def test_a_chief_and_its_worker():
    chief, worker = by_hand(*TENSORFLOW, "--strategy", "parameter-server")
    assert (chief.returncode, worker.returncode, worker.output) == (0, 0, ""), chief.output + worker.output
    assert chief.stdout.startswith("Epoch =  1:")


def test_ranks_that_would_take_the_same_gpu():
    """Each rank has a separate terminal, so each reports the mistake."""
    for rank in by_hand(*PYTORCH, "--strategy", "ddp", LOCAL_RANK="0"):
        assert (rank.returncode, rank.stdout) == (2, ""), rank.output
        [line] = rank.stderr.splitlines()
        assert "expected LOCAL_RANK to count from 0 to 1 for rank 0, 1 on " in line and "received 0, 0" in line


def test_ranks_with_other_flags():
    for rank in by_hand(*PYTORCH, "--strategy", "ddp", prefixes=(("sh", "-c", '"$@" --epochs 2', "sh"), ())):
        assert (rank.returncode, rank.stdout) == (2, ""), rank.output
        [line] = rank.stderr.splitlines()
        assert "expected the same flags on all ranks, received --epochs 2 on rank 0 and 1 on rank 1" in line
