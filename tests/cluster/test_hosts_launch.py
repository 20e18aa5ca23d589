"""Jobs over two hosts, started by the command lines in docs/clusters.md and of `allstep hosts`.

Oracle: metrics.jsonl of the run, the processes of each host, and runs on one host.
"""

from __future__ import annotations

import gzip
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest
from cluster import bed
from ranks import BIN, REPOSITORY, events, full, last, train

from allstep.commands.hosts.command import launch_lines, read_hostfile
from allstep.commands.parity import command as parity

TWO_SERVERS = REPOSITORY / "hostfiles" / "two-servers"
LINES = launch_lines(read_hostfile(TWO_SERVERS))
SERVERS = ("server1", "server2")
SHORT = ("--epochs", "1")


def world(output_dir: Path) -> tuple[str, int]:
    start = last(events(output_dir), "start")
    return start["strategy"], start["world_size"]


def metrics_record(output_dir: Path, event: str) -> bool:
    metrics = output_dir / "metrics.jsonl"
    return metrics.exists() and f'"event": "{event}"' in metrics.read_text()


SERVERS_LIST, SERVERS_FILE = "-H server1:4,server2:4", f"--hostfile {TWO_SERVERS}"


@pytest.mark.parametrize(
    ("framework", "start"),
    [
        ("pytorch", f"horovodrun -np 8 {SERVERS_LIST}"),
        ("tensorflow", f"horovodrun -np 8 {SERVERS_LIST}"),
        ("pytorch", f"horovodrun --gloo -np 8 {SERVERS_FILE}"),
        full("tensorflow", f"horovodrun --gloo -np 8 {SERVERS_FILE}"),
        full("tensorflow", f"horovodrun --gloo -np 8 {SERVERS_LIST}"),
        full("tensorflow", f"horovodrun -np 8 {SERVERS_FILE}"),
        full("tensorflow", f"mpirun -np 8 {SERVERS_FILE} --bind-to none -x PATH"),
        full("pytorch", f"horovodrun --gloo -np 8 {SERVERS_LIST}"),
        full("pytorch", f"horovodrun -np 8 {SERVERS_FILE}"),
        full("pytorch", f"mpirun -np 8 {SERVERS_FILE} --bind-to none -x PATH"),
    ],
)
def test_eight_ranks(framework, start, tmp_path):
    """The commands of docs/clusters.md work as written."""
    flags = (*SHORT, "--output-dir", tmp_path / "run")
    program = ("python", f"{framework}/train.py")
    with bed.running(*shlex.split(start), *program, *flags, output=tmp_path / "printed") as job:
        job.wait_until(lambda: metrics_record(tmp_path / "run", "start"))
        ranks = {
            host: [words for words in job.commands_on(host) if words.startswith(f"python {framework}/train.py")]
            for host in SERVERS
        }
        assert job.process.wait(300) == 0, job.output.read_text()
    assert {host: len(found) for host, found in ranks.items()} == dict.fromkeys(SERVERS, 4)
    assert world(tmp_path / "run") == ("horovod", 8)
    assert job.output.read_text().count("Epoch =  1") == 1


@pytest.mark.full
def test_torchrun(tmp_path):
    """Each of torchrun's lines is typed on its own host."""
    here = f"cd {REPOSITORY}; . {BIN}/activate; export OMP_NUM_THREADS=1; "
    there = f" --epochs 1 --output-dir {tmp_path}/run"
    typed = {host: f"ssh {host} {shlex.quote(here + LINES[f'torchrun on {host}'] + there)}" for host in SERVERS}
    result = bed.run("bash", "-c", f"{typed['server2']} & {typed['server1']} && wait $!")
    assert result.returncode == 0, result.output
    assert world(tmp_path / "run") == ("ddp", 8)


@pytest.mark.full
@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
@pytest.mark.parametrize(
    ("framework", "strategy", "hosts"),
    [
        ("pytorch", "ddp", "server1:1,server2:1"),
        ("tensorflow", "multi-worker-mirrored", "server1:1,server2:1"),
        ("tensorflow", "parameter-server", "server1:2,server2:1"),
    ],
)
def test_other_strategies(framework, strategy, hosts, controller, tmp_path):
    num_ranks = sum(int(host[-1]) for host in hosts.split(","))
    launch = ("horovodrun", controller, "-np", str(num_ranks), "-H", hosts, "python", f"{framework}/train.py")
    result = bed.run(*launch, "--strategy", strategy, *SHORT, "--output-dir", tmp_path)
    assert result.returncode == 0, result.output
    assert world(tmp_path) == (strategy, num_ranks)


# Tiny files replace MNIST's, with the same names and their own checksums.
DOWNLOAD = """
import hashlib, sys
from pathlib import Path
from allstep.common.data.datasets import mnist
from allstep.common.data.datasets.download import RemoteFile
from allstep.common.process.exit import run_rank
from allstep.pytorch import train
files = [Path("{served}") / file.name for file in mnist.FILES["mnist"]]
mnist.FILES["mnist"] = tuple(
    RemoteFile(file.name, file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files
)
run_rank(train.main)
"""


def test_data_is_downloaded_once_a_host(tmp_path):
    """Each host has its own home directory and hence its own cache."""
    served, log, script = tmp_path / "served", tmp_path / "requests", tmp_path / "download.py"
    served.mkdir()
    for split, number in (("train", 64), ("t10k", 16)):
        (served / f"{split}-images-idx3-ubyte.gz").write_bytes(idx(np.zeros((number, 28, 28), np.uint8)))
        (served / f"{split}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(number, dtype=np.uint8) % 10))
    script.write_text(DOWNLOAD.format(served=served))
    serve = f"python -m http.server 8000 --directory {served} 2>{log} &"
    answers = "until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done"
    train_there = (
        f"horovodrun -np 4 -H server1:2,server2:2 python {script} --dataset mnist --mirror http://launcher:8000 "
        f"--epochs 1 --output-dir {tmp_path}/run"
    )
    result = bed.run("bash", "-c", f"{serve} {answers}; {train_there}")
    assert result.returncode == 0, result.output
    assert world(tmp_path / "run") == ("horovod", 4)
    requests = [line.split()[0] + line.split('"')[1] for line in log.read_text().splitlines() if '"GET' in line]
    assert sorted(requests) == sorted(
        f"{address}GET /{file.name} HTTP/1.1" for address in ("10.77.0.1", "10.77.0.2") for file in served.iterdir()
    )


def idx(array: np.ndarray) -> bytes:
    """Return the array in the IDX format, as LeCun's page on MNIST describes it."""
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def test_goes_on_on_other_hosts(tmp_path):
    """All hosts lose power in the middle of an epoch; other hosts resume from the shared directory."""
    flags = (*parity.DATA_FLAGS, "--base-lr", "0.005", "--epochs", "4", "--checkpoint-every", "10")
    flags = (*map(str, flags), "--log-every", "1")
    launch = ("horovodrun", "-np", "2", "-H", "server1:1,server2:1", "python", "pytorch/train.py")
    output, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    with bed.running(*launch, *flags, "--output-dir", output, output=tmp_path / "printed") as job:
        job.wait_until(lambda: checkpoints.exists() and list(checkpoints.glob("step-*")))
    assert not metrics_record(output, "end")
    launch = ("horovodrun", "-np", "3", "-H", "server2:1,server3:2", "python", "pytorch/train.py")
    resumed = bed.run(*launch, *flags, "--output-dir", output, "--resume", "latest", num_hosts=3)
    assert resumed.returncode == 0, resumed.output
    undisturbed = train("pytorch", "alone", 1, tmp_path / "alone", *flags)
    losses, expected = (
        [(event["step"], event["loss"]) for event in run if event["event"] == "step"]
        for run in (events(output), undisturbed)
    )
    assert [step for step, _ in losses] == [step for step, _ in expected]
    # Rounding at a ReLU's kink may make runs on other numbers of ranks diverge by 1e-3 (commands/parity/command.py);
    # a batch that is left out or taken twice shows as 1e-1.
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=0.02)
