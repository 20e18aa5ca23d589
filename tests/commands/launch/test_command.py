"""The batch scripts of `allstep launch`. Oracles: bash, which runs them, and shellcheck; tests/cluster has Slurm."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from requirements import need

from allstep.commands.launch import command as batch
from allstep.common.base.errors import UserError

# Stands in for the launchers: logs its arguments, and reacts to a notice as ranks do.
RANK = """\
#!/bin/bash
name=${0##*/}
trap 'echo "$name noticed" >>calls; exit 0' USR1 TERM
echo "$name $*" >>calls
[ "${WAITS:-}" != "$name" ] || for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""
TRAIN = ("--", "pytorch/train.py", "--output-dir", "runs/a")


def written(capsys, *words: str) -> str:
    batch.main(["--slurm", *words])
    return capsys.readouterr().out


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_options_of_a_job(capsys):
    flags = "--nodes 2 --ranks-per-node 4 --cpus-per-rank 8 --gpus --time 1-4:00:00 --partition gpu --account physics"
    assert options(written(capsys, *shlex.split(flags), *TRAIN)) == {
        "job-name": "allstep",
        "nodes": "2",
        "ntasks-per-node": "4",
        "cpus-per-task": "8",
        "gpus-per-node": "4",
        "time": "1-4:00:00",
        "partition": "gpu",
        "account": "physics",
        "signal": "B:USR1@120",
        "open-mode": "append",
        "requeue": "",
    }


CASES = [
    TRAIN,
    ("--launcher", "srun", *TRAIN, "--strategy", "ddp"),
    ("--launcher", "srun", *TRAIN),
    ("--launcher", "srun", *TRAIN, "--config", "ddp.yaml", "--config", "on-the-cluster.yaml"),
    ("--each", "seed=0,1,2", *TRAIN),
    ("--", "tensorflow/train.py", "--output-dir=runs/a b'c", "--model", "$(reboot)"),
    ("--each", "models=cnn,resnet18", "--", "allstep", "compare", "--output-dir", "runs/a"),
    ("--", "pytorch/train.py", "--output-dir", "runs/a\n#SBATCH --wrap=reboot"),
]


@pytest.mark.parametrize("words", CASES)
def test_shellcheck_has_nothing_to_say(words, capsys):
    need("shellcheck")
    # SC2016 warns about $ in single quotes, which may come from the user.
    result = subprocess.run(
        ["shellcheck", "--exclude=SC2016", "-"], input=written(capsys, *words), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return a start folder where the programs that a script calls log their arguments."""
    for name in ("mpirun", "srun", "scontrol", "allstep"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RANK)
        program.chmod(0o755)
    (tmp_path / "ddp.yaml").write_text("strategy: ddp\n")
    for framework in ("pytorch", "tensorflow"):
        (tmp_path / framework).mkdir()
        (tmp_path / framework / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(script: str, host: Path, **environ: str) -> subprocess.Popen:
    path = re.sub(r"^export PATH=.*$", f"export PATH={host}/bin:$PATH", script, flags=re.MULTILINE)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURMD_NODENAME": "gpu01"}
    return subprocess.Popen(["bash", "-c", path], env={**os.environ, **slurm, **environ})


def calls(host: Path) -> list[str]:
    return (host / "calls").read_text().splitlines()


MPIRUN = "mpirun -np 1 --bind-to none -x PATH python"


STARTED = [
    f"{MPIRUN} pytorch/train.py --output-dir runs/a --resume auto",
    "srun --cpus-per-task=1 --kill-on-bad-exit=1 python pytorch/train.py --strategy ddp --output-dir runs/a "
    "--resume auto",
    "srun --mpi=pmix --cpus-per-task=1 --kill-on-bad-exit=1 python pytorch/train.py --output-dir runs/a --resume auto",
    "srun --cpus-per-task=1 --kill-on-bad-exit=1 python pytorch/train.py --config ddp.yaml "
    "--config on-the-cluster.yaml --output-dir runs/a --resume auto",
    f"{MPIRUN} pytorch/train.py --seed 1 --output-dir runs/a/1 --resume auto",
    f"{MPIRUN} tensorflow/train.py --model $(reboot) --output-dir runs/a b'c --resume auto",
    "allstep compare --models resnet18 --output-dir runs/a/resnet18/gpu01",
    f"{MPIRUN} pytorch/train.py --output-dir runs/a",
]


@pytest.mark.parametrize(("words", "expected"), list(zip(CASES, STARTED, strict=True)))
def test_what_a_script_starts(words, expected, host, capsys):
    assert start(written(capsys, *words), host).wait(30) == 0
    assert calls(host)[0] == expected


@pytest.mark.parametrize(("words", "name"), [(TRAIN, "mpirun"), (CASES[6], "allstep")])
def test_a_notice_is_passed_on_and_queues_the_job_again(words, name, host, capsys):
    job = start(written(capsys, *words), host, WAITS=name)
    while not (host / "calls").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(10)  # SIGUSR1
    job.wait(30)
    assert calls(host)[1:] == [f"{name} noticed", "scontrol requeue 7"]


def test_a_notice_before_anything_runs_queues_the_job_again(host, capsys):
    script = written(capsys, *TRAIN)
    assert start(script.replace("\nmpirun", "\nkill -USR1 $$\nmpirun"), host).wait(30) == 0
    assert calls(host) == ["scontrol requeue 7"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected pytorch/train.py or tensorflow/train.py with its flags"),
        (["--", "rm", "-rf", "/"], "received rm"),
        (["--", "pytorch/train.py"], "expected --output-dir in the command, received none"),
        ([*TRAIN, "--resume", "latest"], "expected a command without --resume"),
        (["--each", "seed=1,2", *TRAIN, "--seed", "3"], "expected --seed in --each or in the command, received both"),
        (["--each", "seed", *TRAIN], "expected --each to be a flag and its values, received seed"),
        (["--each", "seed=1,$(reboot)", *TRAIN], "expected --each to be a flag and its values"),
        (["--time", "4h", *TRAIN], "expected --time to be a time of Slurm's, received 4h"),
        (["--partition", "gpu\n#SBATCH --wrap=x", *TRAIN], "expected --partition to be names"),
        (["--nodes", "0", *TRAIN], "expected --nodes to be at least 1, received 0"),
        (["--launcher", "horovodrun", *TRAIN], "expected --launcher to be one of mpirun, srun"),
        (["--submit", *TRAIN], "expected sbatch on the PATH for --submit, received none"),
    ],
)
def test_mistakes(words, message, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=re.escape(message)):
        batch.main(["--slurm", *words])


def test_it_is_for_slurm():
    with pytest.raises(UserError, match="expected --slurm"):
        batch.main([*TRAIN])


def test_a_trainer_is_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    batch.main(["--slurm", "--", "tensorflow/train.py", "--output-dir", "runs/a"])
    assert " python -m allstep.tensorflow.train --output-dir runs/a " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no such file: \S+/pytorch/train.py; give the path of a trainer as seen from"):
        batch.main(["--slurm", "--", f"{tmp_path}/pytorch/train.py", "--output-dir", "runs/a"])
