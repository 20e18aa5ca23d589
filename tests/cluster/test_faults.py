"""Faults of jobs over two hosts: the job ends in time, prints the reason once, and leaves no process on any host.

Oracle: the contract of `commands/soak/faults.py`; the processes of each host.
"""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_start
from cluster import bed
from cluster.bed import Job
from ranks import BIN, REPOSITORY, full

from allstep.commands.parity import command as parity
from allstep.commands.soak.faults import CLEAN_SECONDS, END_SECONDS, REPORTED, faulty
from allstep.commands.soak.training import last_step
from allstep.common.checkpoint import load

STEP = 5
HOSTS = ("server1", "server2")
LAUNCHERS = {
    "horovodrun-gloo": "horovodrun --gloo --disable-cache -np 4 -H server1:2,server2:2 python",
    "horovodrun-mpi": "horovodrun --mpi --disable-cache -np 4 -H server1:2,server2:2 python",
    "mpirun": "mpirun -np 4 -H server1:2,server2:2 --bind-to none -x PATH python",
    "torchrun": "torchrun --nnodes 2 --master-addr server1 --master-port 29500 --nproc-per-node 2",
}
FLAGS = (*parity.DATA_FLAGS, "--epochs", "1000", "--log-every", "1", "--checkpoint-every", "2")
# A cut link is noticed after two thirds of this, or when Open MPI's own keepalive ends the job.
FAULT_TIMEOUT = 9
MPIRUN_SECONDS = 30
STALL_TIMEOUT = 3
# ssh takes this long to start and end a process on a crowded machine.
KILL_THE_LAUNCHER = "kill -{} $(pgrep -o -f '^[^ ]*(python3?[^ ]* [^ ]*horovodrun|mpirun) ')"
# Only the first match: processes that a rank starts inherit its environment.
SIGNAL_RANK_2 = """
for process in $(ip netns pids server2 | sort -n); do
  grep -qzE '^(OMPI_COMM_WORLD_RANK|HOROVOD_RANK|RANK)=2$' /proc/$process/environ && exec kill -{} $process
done
"""
KILL_RANK_2 = SIGNAL_RANK_2.format("KILL")
# The hosts outlive the job, so that the test can look at them.
OUTLIVING = ("bash", "-c", '"$@"; echo "status $?"; sleep 120', "job")


@dataclass(frozen=True)
class Kind:
    """A fault of a host, a rank or the launcher, or of a trainer itself, and the expected message."""

    command: str = ""
    """Command that causes the fault, run on the launcher host."""
    why: str = ""
    """Pattern of the message; empty where no process is left to print it."""
    cuts: bool = False
    program: str = ""
    """Fault of `commands/soak/fault_injection.py` on rank 2, in place of a command."""


KINDS = {
    "killed rank": Kind(KILL_RANK_2, r"rank 2 of 4 on server2 stopped at step \d+: gone without a word"),
    "killed host": Kind(
        # Its ranks end one after the other, in any order; the launcher may end rank 0 before it has heard of both.
        "kill -9 $(pgrep -P $(cat /run/bed/server2.pid))",
        r"ranks? (2|3|2, 3) of 4 on server2 .*gone without a word",
    ),
    "cut link": Kind("ip link set v2 down", r"ranks 2, 3 of 4 on server2 .*not heard of", cuts=True),
    "cut link of rank 0": Kind("ip link set v1 down", "rank 0 of 4 on server1 stopped .*not heard of", cuts=True),
    "a rank that raises": Kind(why="rank 2 of 4 on server2 stopped: step 5 failed: .*lost the disk", program="raises"),
    "a stuck rank": Kind(why=r"rank 2 of 4 on server2 stopped at step 5: stuck for \d+ s in reading", program="stuck"),
    # Its gradients of step 6 may be reduced with the others' of step 5, so that the next collectives mismatch. Gloo,
    # under DDP, reports this itself and aborts the rank that received them.
    "a rank that leaves a collective out": Kind(
        why="rank 2 of 4 on server2 stopped at step [56]: left a collective out"
        "|collective mismatch in your code(?s:.*)rank . of 4 on server. stopped at step [56]: gone without a word",
        program="leaves-out",
    ),
    "SIGKILL of the launcher": Kind(KILL_THE_LAUNCHER.format("KILL")),
    "SIGTERM of the launcher": Kind(KILL_THE_LAUNCHER.format("TERM")),
    "SIGINT of the launcher": Kind(KILL_THE_LAUNCHER.format("INT")),
}
OF_RANKS = ("killed rank", "a rank that raises", "a stuck rank", "a rank that leaves a collective out")
QUICK = [
    ("killed host", "horovodrun-mpi", "pytorch"),
    ("killed rank", "torchrun", "pytorch"),
    ("cut link", "horovodrun-gloo", "pytorch"),
    ("SIGKILL of the launcher", "horovodrun-gloo", "tensorflow"),
]
REST = [
    (kind, launcher, framework)
    for kind in KINDS
    for launcher in LAUNCHERS
    for framework in ("pytorch", "tensorflow")
    if (kind, launcher, framework) not in QUICK
    # torchrun starts no strategy of TensorFlow, and each host has its own launcher.
    if launcher != "torchrun" or (framework == "pytorch" and kind in OF_RANKS)
]


def case(kind: str, launcher: str, framework: str, *marks: pytest.MarkDecorator) -> object:
    """Return a case, in which a fork cannot see that its client's parent has ended."""
    # Beyond a cut link, Open MPI's daemon waits longer for a fork's client than for a rank.
    is_cold = kind == "SIGKILL of the launcher" or (KINDS[kind].cuts and launcher in ("horovodrun-mpi", "mpirun"))
    start = (pytest.mark.cold,) if is_cold else ()
    return pytest.param(kind, launcher, framework, marks=(*start, *marks))


def command(kind: Kind, launcher: str, framework: str, output_dir: Path) -> list[str]:
    """Return the command that a user types on the launcher host."""
    timeouts = ("--fault-timeout", FAULT_TIMEOUT, "--stall-timeout", STALL_TIMEOUT)
    flags = [*map(str, timeouts), *map(str, FLAGS), "--output-dir", str(output_dir)]
    program = faulty(framework, kind.program, 2, STEP) if kind.program else [f"{framework}/train.py"]
    words = [*shlex.split(LAUNCHERS[launcher]), *program, *flags]
    if launcher != "torchrun":
        return words
    here = f"cd {REPOSITORY}; . {BIN}/activate; export {warm_start.exports()} OMP_NUM_THREADS=1; "
    words += ["--strategy", "ddp"]
    typed = [
        f"ssh {host} {shlex.quote(here + shlex.join([*words[:1], '--node-rank', str(number), *words[1:]]))}"
        for number, host in enumerate(HOSTS)
    ]
    return ["bash", "-c", f"{typed[1]} & {typed[0]}; status=$?; wait; exit $status"]


@pytest.mark.parametrize(
    ("kind", "launcher", "framework"), [*(case(*of) for of in QUICK), *(case(*of, pytest.mark.full) for of in REST)]
)
def test_ends_everywhere_and_says_why(kind, launcher, framework, tmp_path):
    fault, output_dir = KINDS[kind], tmp_path / "run"
    words = [*OUTLIVING, *command(fault, launcher, framework, output_dir)]
    # A step is reported while the next one is computed.
    due = STEP - 2 if fault.program else STEP
    with bed.running(*words, output=tmp_path / "printed") as job:
        job.wait_until(lambda: last_step(output_dir) >= due)
        if fault.command:
            job.wait_until(lambda: saved_step(output_dir) >= due - 2)  # written in the background
            job.inside("bash", "-c", fault.command)
        by_mpi = launcher in ("horovodrun-mpi", "mpirun")
        limit = (MPIRUN_SECONDS if by_mpi else FAULT_TIMEOUT) + END_SECONDS if fault.cuts else END_SECONDS
        started = time.monotonic()
        job.wait_until(lambda: "\nstatus " in job.output.read_text(), limit)
        ended = time.monotonic()
        # Open MPI's daemon on the disconnected host ends by its own timeout.
        deadline = time.monotonic() + CLEAN_SECONDS + (MPIRUN_SECONDS if fault.cuts and by_mpi else 0)
        while left := trainers(job):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        printed = job.output.read_text()
    print(f"ended in {ended - started:.1f} s, clean {time.monotonic() - ended:.1f} s later")
    assert not re.search(r"^status 0$", printed, re.MULTILINE), printed
    if fault.why:
        assert len(REPORTED.findall(printed)) == 1 and re.search(fault.why, printed), printed
    assert load("latest", output_dir / "checkpoints", warn=pytest.fail).progress.step >= due - 2


@pytest.mark.parametrize(
    ("number", "launcher", "framework"),
    [
        ("USR1", "horovodrun-gloo", "pytorch"),
        full("TERM", "horovodrun-mpi", "tensorflow"),
        full("USR1", "mpirun", "tensorflow"),
        full("TERM", "torchrun", "pytorch"),
    ],
)
def test_a_notice_to_one_rank_stops_all_at_the_same_step(number, launcher, framework, tmp_path):
    """Oracle: status 0, and a checkpoint of the reported step."""
    output_dir = tmp_path / "run"
    words = [*OUTLIVING, *command(Kind(), launcher, framework, output_dir)]
    with bed.running(*words, output=tmp_path / "printed") as job:
        job.wait_until(lambda: last_step(output_dir) >= STEP)
        job.inside("bash", "-c", SIGNAL_RANK_2.format(number))
        job.wait_until(lambda: "\nstatus " in job.output.read_text())
        printed = job.output.read_text()
        assert not trainers(job)
    stopped = re.findall(r"rank 0 of 4 on server1 stopped after step (\d+) by SIG(\w+); resumable", printed)
    assert re.search(r"^status 0$", printed, re.MULTILINE) and len(REPORTED.findall(printed)) == 1, printed
    progress = load("latest", output_dir / "checkpoints", warn=pytest.fail).progress
    assert stopped == [(str(progress.step), number)], printed


def saved_step(output_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    names = (path.name for path in output_dir.glob("checkpoints/step-*"))
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def trainers(job: Job) -> list[str]:
    """Return the command lines of the job's processes that still run on the hosts."""
    lines = [line for host in HOSTS for line in job.commands_on(host)]
    return [line for line in lines if re.search(r"train\.py|faulty|torchrun|orted", line)]


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", full("mpirun")])
def test_a_host_that_is_down_before_the_start(launcher, tmp_path):
    """The launch fails long before 44 s; Open MPI's message has several lines, but names the host as well."""
    line = f"ip link set v2 down; timeout 20 {LAUNCHERS[launcher]} pytorch/train.py"
    result = bed.run("bash", "-c", line, timeout=60)
    assert result.returncode not in (0, 124), result.output
    assert result.output.count("connect to host server2 port 22") == 1, result.output
    assert "Traceback" not in result.output


def test_a_host_of_an_elastic_job_that_is_down_before_the_start():
    """horovodrun connects to all hosts once, to find a common network."""
    ranks = "-np 2 --min-np 2 --host-discovery-script 'echo server1:1; echo server2:1'"
    line = f"ip link set v2 down; horovodrun {ranks} python pytorch/train.py --elastic --global-batch-size 32"
    result = bed.run("bash", "-c", line, timeout=60)
    assert result.returncode == 1, result.output
    assert re.fullmatch("horovodrun: cannot start on server2: ssh: connect to host server2 .*\n", result.output)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_host_that_starts_late(elastic):
    """The launch prints one line about the late host, and none from helper processes that are still starting."""
    hosts, flags = "-H server1:1,server2:1", ""
    if elastic:
        hosts = "--min-np 2 --host-discovery-script 'echo server1:1; echo server2:1'"
        flags = "--elastic --global-batch-size 32"
    slow = "tc qdisc add dev v2 root tbf rate 20kbit burst 2k latency 9s"
    line = f"{slow}; horovodrun --start-timeout 1 -np 2 {hosts} python pytorch/train.py {flags}"
    result = bed.run("bash", "-c", line, timeout=60)
    assert result.returncode == 1, result.output
    assert re.fullmatch("horovodrun: Timed out waiting .* Timeout after 1 seconds.\n", result.output), result.output
