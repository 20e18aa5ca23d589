"""A job on one host cannot be reached from another. Oracle: the kernel's list of sockets, throughout the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import bed
from ranks import full

# Listeners listed in README.md under Security: they have no option for the address.
MPIRUN = {("*", "orterun_wrapper"), ("0.0.0.0", "orterun_wrapper")}
TORCHRUN = {("*", "pt_elastic")}
TENSORFLOW_S_SERVERS = {("*", "python")}


def open_to_others(command: str, tmp_path: Path) -> set[tuple[str, str]]:
    """Return addresses that other hosts can reach and programs that listened there, at any time of the job."""
    found: set[tuple[str, str]] = set()
    # The host outlives the job, so that it can be observed to the end.
    command += f" --epochs 1 --output-dir {tmp_path}/run; echo ended with $?; sleep infinity"
    with bed.running("bash", "-c", command, output=tmp_path / "printed", num_hosts=0) as job:

        def look() -> bool:
            found.update(job.listening())
            return "ended with" in job.output.read_text()

        job.wait_until(look)
        assert "ended with 0" in job.output.read_text(), job.output.read_text()
    assert found  # the observation worked
    return {(address, program) for address, program in found if not address.startswith(("127.", "[::1]"))}


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("horovodrun -np 2 python pytorch/train.py", MPIRUN),
        ("horovodrun --gloo -np 2 python pytorch/train.py", set()),
        *(
            full(command, allowed)
            for command, allowed in [
                ("mpirun -np 2 --oversubscribe python tensorflow/train.py", MPIRUN),
                ("horovodrun --gloo -np 2 python tensorflow/train.py", set()),
                ("horovodrun --gloo -np 2 python pytorch/train.py --strategy fsdp", set()),
                ("python pytorch/train.py --strategy ddp --num-gpus 2", set()),
                ("torchrun --standalone --nproc-per-node 2 pytorch/train.py --strategy ddp", TORCHRUN),
                (
                    "horovodrun --gloo -np 2 python tensorflow/train.py --strategy multi-worker-mirrored",
                    TENSORFLOW_S_SERVERS,
                ),
                (
                    "horovodrun --gloo -np 3 python tensorflow/train.py --strategy parameter-server",
                    TENSORFLOW_S_SERVERS,
                ),
            ]
        ),
    ],
)
def test_closed(command, allowed, tmp_path):
    assert open_to_others(command, tmp_path) <= allowed
