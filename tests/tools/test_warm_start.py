"""Programs that start as forks of a process with the framework. Oracle: the same program in a process of its own."""

import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import warm_start
from ranks import environment
from requirements import need

PROGRAM = """
import {framework}
import ctypes, json, multiprocessing.process, os, resource, signal, sys, tempfile
class Left:
    def __del__(self):
        print("an object was left", file=sys.stderr)
left = Left()
facts = {{
    "words": [sys.argv, sys.orig_argv, sys.executable, __name__, globals().get("__file__")],
    "path": sys.path, "folders": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR, tempfile.gettempdir()],
    **{{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}},
    "cpus": list(os.sched_getaffinity(0)), "umask": os.umask(0),
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
    "handlers": [str(signal.getsignal(number)) for number in range(1, signal.NSIG)],
    "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "threads": len(os.listdir("/proc/self/task")),
    "files": [number for number in range(30) if os.path.exists(f"/proc/self/fd/{{number}}")],
    "streams": [[one.name, one.encoding, one.line_buffering, one.write_through] for one in (sys.stdout, sys.stderr)],
    "file": os.read(9, 100).decode(), "input": sys.stdin.read(),
}}
print(json.dumps([facts, "horovod" in sys.modules]))
print("to standard error", file=sys.stderr)
sys.stdout.flush()
ctypes.CDLL(None).puts(b"by a C library")
{end}
"""
ENDS = {"fails": "raise ValueError('lost')", "exits": "sys.exit(7)", "is killed": "os.kill(os.getpid(), 9)",
        "ends": "", "says why": "sys.exit('why')", "is interrupted": "signal.raise_signal(2)",
        "kills its group": "sys.stdout.flush(); os.killpg(os.getpgrp(), 9)"}  # fmt: skip
IS_FORKED = """
import sys
import time
print("horovod.torch" in sys.modules)
if False:
    import torch
"""


def warm(*others: str, **extra: str) -> dict[str, str]:
    return {**environment(), **warm_start.path(*others), **extra}


def result_of(variables: dict[str, str], folder: Path, words: Sequence[str]) -> tuple[int, tuple, str]:
    line = 'umask 027; ulimit -n 500; trap "" HUP; exec 9<<<nine; exec "$0" "$@"'
    result = subprocess.run(
        ["taskset", "-c", "0", "bash", "-c", line, sys.executable, *words],
        env=variables,
        input="typed",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        start_new_session=True,
    )
    facts, *rest = result.stdout.splitlines()
    return result.returncode, tuple(json.loads(facts)), "\n".join([*rest, result.stderr])


@pytest.mark.parametrize("framework, end", [*(("torch", end) for end in ENDS), ("tensorflow", "ends")])
def test_as_in_a_process_of_its_own(framework, end, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(framework=framework, end=ENDS[end]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import sys\nprint(sys.argv, sys.path, file=sys.stderr)\n")
    other = str(tmp_path / "other")
    starts = [["program.py", "--flag", "a b"], ["-u", str(program)], ["-c", program.read_text(), "--flag"]]
    for words in starts if end == "ends" and framework == "torch" else starts[:1]:
        status, (facts, is_forked), error = result_of(warm(other), tmp_path, words)
        own = {**environment(), "PYTHONPATH": other}
        expected_status, (alone, _), expected_error = result_of(own, tmp_path, words)
        assert is_forked
        different = {name for name in {**facts, **alone} if facts.get(name) != alone.get(name)}
        different = {name for name in different if not name.startswith("KMP_")}  # scikit-learn's, which is left out
        assert different == set(), {name: (facts.get(name), alone.get(name)) for name in different}
        if framework == "tensorflow":  # whose import prints lines
            error, expected_error = error.splitlines()[-2:], expected_error.splitlines()[-2:]
        assert (status, error) == (expected_status, expected_error)


@pytest.mark.parametrize(
    "text, words, framework",
    [
        ("import sys, keras", (), "tensorflow"),
        ("def build():\n    from torch import nn", (), "pytorch"),
        ("import torch\nimport keras", (), None),
        ("import torch\nimport keras", ("pytorch", "2"), "pytorch"),
        ("import allstep", ("tensorflow",), "tensorflow"),
        ("import numpy as np, sys", ("tensorflow",), None),
        ("", ("-m", "allstep.pytorch.train"), "pytorch"),
        ("", ("-u", "-m", "allstep.commands.collectives.backends.worker", "horovod-tensorflow"), "tensorflow"),
        ("", ("-m", "allstep.commands.cli", "compare", "--frameworks", "pytorch"), None),
        ("", ("-m", "allstep.commands.cli", "evaluate", "RUN"), "tensorflow"),
        ("", ("-m", "allstep.commands.cli", "evaluate", "RUN", "--framework", "pytorch"), "pytorch"),
        ("", ("/venv/bin/allstep", "export", "RUN"), "tensorflow"),
        ("", ("/venv/bin/allstep", "difficulty", "--output", "a.npy"), "pytorch"),
        ("", ("/venv/bin/allstep", "parity", "--framework", "pytorch"), None),
        ("", ("-m", "pytest", "pytorch"), None),
        ("", ("-I", "-c", "import torch"), None),
        ("", ("-X", "dev", "-c", "import torch"), None),
    ],
)
def test_which_programs_are_forks(text, words, framework, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(text)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "metrics.jsonl").write_text('{"event": "start", "framework": "tensorflow"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", *([str(program)] if text else []), *words])
    monkeypatch.setenv("PYTHONPATH", str(warm_start.FOLDER))
    found = runpy.run_path(str(warm_start.FOLDER / "warm_client.py"))["_program"]()
    assert (found and found[0]) == framework


@pytest.mark.parametrize(
    "start, variables, is_forked",
    [
        ("", {}, True),
        ("", {"HOROVOD_CYCLE_TIME": "2"}, True),
        ("", {"OMP_NUM_THREADS": "2"}, False),
        ("", {"SOME_LIBRARY": "1"}, False),
        ("nice ", {}, False),
        ("ulimit -v 100000000; ", {}, False),
        ("unshare --net ", {}, True),
        ("unshare --cgroup ", {}, False),
        ("setpriv --groups 1 ", {}, True),
        ("exec 0<&-; ", {}, False),
        ("touch tyro.py; ", {}, False),  # another module than the one that is imported
    ],
)
def test_a_fork_has_the_same_circumstances(start, variables, is_forked, tmp_path):
    if start.startswith(("unshare", "setpriv")):
        need("unshare", "setpriv", root=True)
    command = ["bash", "-c", f'{start}"$0" "$@"', sys.executable, "-c", IS_FORKED]
    result = subprocess.run(command, env={**warm(), **variables}, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == f"{is_forked}\n", result.stderr


def test_a_fork_is_on_the_host_of_its_client():
    need("unshare", "setpriv", root=True)
    facts = "import os, socket; print(socket.gethostname(), socket.if_nameindex(), os.getpid() < 20, "
    facts += "os.listdir('/dev/shm'), os.getgroups())" + IS_FORKED
    host = 'hostname other; mount -t tmpfs tmpfs /dev/shm; setpriv --groups 1 "$0" "$@"; true'  # not exec
    options = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    command = ["unshare", *options, "bash", "-c", host, sys.executable, "-c", facts]
    result = subprocess.run(command, env=warm(), capture_output=True, text=True)
    assert result.stdout == "other [(1, 'lo')] True [] [1]\nTrue\n", result.stderr


@pytest.mark.parametrize("start, is_forked", [([], True), (["setsid", "--ctty"], False)])
def test_no_fork_has_a_controlling_terminal(start, is_forked):
    """Ranks of mpirun write to terminals, which are not theirs."""
    ours, theirs = pty.openpty()
    command = [*start, sys.executable, "-c", f"{IS_FORKED}print(sys.stdout.line_buffering)"]
    subprocess.run(command, env=warm(PYTHONUNBUFFERED=""), stdin=theirs, stdout=theirs, check=True)
    assert os.read(ours, 100) == b"%s\r\nTrue\r\n" % str(is_forked).encode()
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("program", ["import random; print(random.random())", "print(hash('name'))",
                                     "import torch; print(torch.rand(1))",
                                     "import tensorflow as tf; print(tf.random.uniform([]).numpy())"])  # fmt: skip
def test_ranks_differ_in_what_is_random(program):
    framework = "" if "import t" in program else "import torch;"
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", framework + program],
            env={**warm(), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (command.communicate()[0] for command in commands)
    assert first and second and first != second


def test_signals_reach_the_fork(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready')\nsignal.pause()\n"
    )
    for number, status in ((signal.SIGTERM, 5), (signal.SIGUSR1, -signal.SIGUSR1), (signal.SIGKILL, -signal.SIGKILL)):
        command = [sys.executable, "-u", str(program)]
        with subprocess.Popen(command, env=warm(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.read() == ""  # the fork has ended
            assert process.wait() == status


STOPS = [(signal.SIGSTOP, "stopped"), (signal.SIGCONT, "sleeping"), (signal.SIGSTOP, "stopped")]


def test_a_fork_stops_with_its_client():
    program = "import torch, os, signal; print(os.getpid()); signal.pause()"
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, env=warm(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        fork = psutil.Process(int(process.stdout.readline()))
        assert fork.pid != process.pid
        for number, state in STOPS:
            process.send_signal(number)
            deadline = time.monotonic() + 60
            while fork.status() != state:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        fork.kill()
        assert process.wait(60) == -signal.SIGKILL
