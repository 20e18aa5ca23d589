"""Train in the environments that users have, each in a fork of one process that has imported all.

    python environments.py DIRECTORY [NAME...]

Writes DIRECTORY/results.json: exit status, what was printed, and the lines of metrics.jsonl, by name.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import allstep.common.training.training_run  # noqa: F401 (so that forks need not import it)
import allstep.pytorch.networks.sequences  # noqa: F401
import allstep.pytorch.strategies.strategy  # noqa: F401
import allstep.pytorch.worker  # noqa: F401
from allstep.common.process.exit import run_rank
from allstep.pytorch.train import main

DIRECTORY = Path(sys.argv[1])
FLAGS = ("--strategy", "single", "--model", "mlp", "--epochs", "1", "--global-batch-size", "256")
LIMIT = 240
Change = Callable[[], object]
"""Function that turns the process's environment into another one."""


def variables(**values: str | None) -> Change:
    """Set variables, or remove those that are None."""

    def change() -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return change


def folder(name: bytes, *, mode: int = 0o755) -> Change:
    """Work in a folder of that name."""

    def change() -> None:
        path = os.fsencode(DIRECTORY) + b"/" + name
        os.mkdir(path)
        os.chdir(path)
        os.chmod(path, mode)

    return change


def removed_folder() -> None:
    path = DIRECTORY / "removed"
    path.mkdir()
    os.chdir(path)
    path.rmdir()


def limited(kind: int, value: int) -> Change:
    return lambda: resource.setrlimit(kind, (value, value))


def without(*descriptors: int) -> Change:
    return lambda: [os.close(descriptor) for descriptor in descriptors]


def file_in_place_of(name: str) -> Change:
    def change() -> None:
        path = DIRECTORY / f"file-of-{name}"
        path.write_text("")
        os.environ[name] = str(path)

    return change


def long_folder_in(name: str) -> Change:
    def change() -> None:
        path = DIRECTORY / ("d" * 200) / ("e" * 100)
        path.mkdir(parents=True)
        os.environ[name] = str(path)

    return change


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1"))
}
ENVIRONMENTS: dict[str, Change] = {
    "as it is": lambda: None,
    "no HOME": variables(HOME=None),
    "HOME that does not exist": variables(HOME="/nonexistent"),
    "no user, shell or terminal": variables(USER=None, LOGNAME=None, SHELL=None, TERM=None),
    "no PATH": variables(PATH=None),
    "terminal of 20 columns": variables(COLUMNS="20", LINES="1", TERM="dumb"),
    "columns that are no number": variables(COLUMNS="wide"),
    "folder that is no UTF-8": folder(b"caf\xe9"),
    "folder with quotes and spaces": folder(b'it\'s a "path" $HOME;x'),
    "folder that cannot be written": folder(b"read-only", mode=0o555),
    "folder that is removed": removed_folder,
    "umask 077": lambda: os.umask(0o077),
    "no standard input": without(0),
    "no standard output": without(1),
    "no standard error": without(2),
    "no standard streams": without(0, 1, 2),
    "64 open files": limited(resource.RLIMIT_NOFILE, 64),
    "files of 4 KB": limited(resource.RLIMIT_FSIZE, 4096),
    "no locked memory, no cores": limited(resource.RLIMIT_MEMLOCK, 0),
    "no GPU by an empty list": variables(CUDA_VISIBLE_DEVICES=""),
    "no GPU by -1": variables(CUDA_VISIBLE_DEVICES="-1"),
    "no number of threads": variables(OMP_NUM_THREADS=None),
    "0 threads": variables(OMP_NUM_THREADS="0"),
    "threads that are a word": variables(OMP_NUM_THREADS="two"),
    "allocator that PyTorch cannot read": variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments"),
    "allocator of PyTorch": variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "threads of two levels": variables(OMP_NUM_THREADS="2,1"),
    "time zone that does not exist": variables(TZ="Nowhere/Bad"),
    "proxies that do not answer": variables(http_proxy="http://127.0.0.1:1", https_proxy="http://127.0.0.1:1"),
    "TMPDIR that does not exist": variables(TMPDIR="/nonexistent"),
    "TMPDIR that is a file": file_in_place_of("TMPDIR"),
    "TMPDIR of a long name": long_folder_in("TMPDIR"),
    "conda": variables(CONDA_PREFIX="/opt/conda", CONDA_DEFAULT_ENV="base", PYTHONNOUSERSITE="1"),
    "left by salloc": variables(**SALLOC, SLURM_NTASKS="1", SLURM_SUBMIT_DIR="/x"),
    "left by horovodrun": variables(HOROVOD_RANK="0", HOROVOD_SIZE="1"),
    "left by mpirun": variables(**OPEN_MPI, OMPI_MCA_btl="tcp"),
    "left by another MPI": variables(PMI_RANK="0", PMI_SIZE="1", PMI_FD="9"),
    "left by torchrun": variables(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", RANK="0", WORLD_SIZE="1"),
    "address alone": variables(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"),
    "warnings are errors": lambda: warnings.simplefilter("error"),
}


def run(name: str) -> dict:
    """Train in a fork, and return how it has ended."""
    number = list(ENVIRONMENTS).index(name)
    printed, output = DIRECTORY / f"{number}.txt", DIRECTORY / f"run-{number}"
    child = os.fork()
    if not child:
        stream = os.open(printed, os.O_WRONLY | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(stream, descriptor)
        os.close(stream)
        os.chdir(DIRECTORY)
        ENVIRONMENTS[name]()
        run_rank(lambda: main([*FLAGS, "--output-dir", str(output)]))
        os._exit(0)
    deadline = time.monotonic() + LIMIT
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    metrics = output / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [line["validation_loss"] for line in lines if line["event"] == "epoch"]
    text = printed.read_text(errors="replace")
    return {"status": os.waitstatus_to_exitcode(status), "printed": text, "losses": losses}


if __name__ == "__main__":
    results = {name: run(name) for name in sys.argv[2:] or ENVIRONMENTS}
    (DIRECTORY / "results.json").write_text(json.dumps(results))
