"""--audit detects a rank with wrong results. Oracle: the flipped bit that `ranks/flipping.py` plants."""

import pytest
from ranks import full, launch

FLAGS = ("--model", "mlp", "--global-batch-size", 100, "--slices", 4, "--audit", 1, "--epochs", 1)


@pytest.mark.parametrize(
    ("framework", "launcher", "num_ranks", "rank", "which", "expected"),
    [
        ("pytorch", "horovodrun-gloo", 3, 1, "all", "rank 1 computes slice 0 with other bits than ranks 0 and 2; look"),
        ("pytorch", "fsdp", 2, 1, "own", "ranks 1 and 0 compute slice 2 with different bits, and no other rank says"),
        ("pytorch", "alone", 1, 0, "own", "rank 0 computed slice 0 twice, with different bits"),
        ("tensorflow", "mpirun", 3, 0, "own", "rank 0 computes slice 0 with other bits than ranks 1 and 2; look"),
        full("tensorflow", "multi-worker-mirrored", 2, 1, "all", "ranks 0 and 1 compute slice 0 with different bits"),
    ],
)
def test_a_flipped_bit_ends_the_job_with_its_rank_and_step(framework, launcher, num_ranks, rank, which, expected):
    own = {"fsdp": ("--strategy", "fsdp", "--num-gpus", num_ranks)}.get(launcher, ())
    if launcher == "multi-worker-mirrored":
        own = ("--strategy", launcher)
    starts_ranks = {"fsdp": "alone", "multi-worker-mirrored": "mpirun"}.get(launcher, launcher)
    words = ("tests/launch/ranks/flipping.py", framework, rank, which, *FLAGS, *own)
    result = launch(starts_ranks, num_ranks, *map(str, words))
    assert result.returncode == 1, result.output
    assert result.output.count(f"stopped: the audit of step 3 found unequal bits: {expected}") == 1, result.output
    assert "Traceback" not in result.output


def test_without_an_audit_nobody_sees_it():
    """Control: without an audit, a wrong gradient is not detected, since it changes the weights of all ranks alike."""
    words = ("tests/launch/ranks/flipping.py", "pytorch", 1, "all", *FLAGS, "--audit", 1e-9)
    result = launch("mpirun", 2, *map(str, words))
    assert result.returncode == 0, result.output
