"""Programs that start as forks of a process with the framework. Oracle: the same program in a process of its own."""

import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from ranks import environment

PROGRAM = """
if False:  # which is enough to be taken for a program of the framework
    import {framework}
import json, os, resource, signal, sys
facts = {{
    "words": [sys.argv, sys.orig_argv, __name__, globals().get("__file__")],
    "path": [name for name in sys.path if "tests/warm" not in name], "folder": os.getcwd(),
    "variables": {{name: value for name, value in os.environ.items() if name != "WARM_FOLDER"}},
    "cpus": list(os.sched_getaffinity(0)), "umask": os.umask(0),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "file": os.read(9, 100).decode(), "input": sys.stdin.read(),
}}
print(json.dumps([facts, "{framework}" in sys.modules]))
print("to standard error", file=sys.stderr)
{end}
"""
ENDS = {"fails": "raise ValueError('lost')", "exits": "sys.exit(7)", "is killed": "os.kill(os.getpid(), 9)",
        "ends": "", "says why": "sys.exit('why')", "is interrupted": "signal.raise_signal(2)"}  # fmt: skip


def warm() -> dict[str, str]:
    return {**environment(), **warm_start.started()}


def result_of(program: Path, variables: dict, *words: str) -> tuple[int, tuple, str]:
    line = 'umask 027; ulimit -n 500; trap "" HUP; exec 9<<<nine; exec "$0" "$@"'
    command = ["taskset", "-c", "0", "bash", "-c", line, sys.executable, *words]
    result = subprocess.run(
        command, env=variables, input="typed", capture_output=True, text=True, timeout=300, cwd=program.parent
    )
    return result.returncode, tuple(json.loads(result.stdout)), result.stderr


@pytest.mark.parametrize("framework, end", [*(("torch", end) for end in ENDS), ("tensorflow", "ends")])
def test_as_in_a_process_of_its_own(framework, end, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(framework=framework, end=ENDS[end]))
    for words in (["program.py", "--flag", "a b"], ["-u", str(program)], ["-c", program.read_text(), "--flag"]):
        status, (facts, forked), error = result_of(program, warm(), *words)
        assert (status, (facts, not forked), error) == result_of(program, {**warm(), "WARM_FOLDER": ""}, *words)
        assert forked


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
        ("", ("-m", "pytest", "pytorch"), None),
        ("", ("-I", "-c", "import torch"), None),
    ],
)
def test_which_programs_are_forks(text, words, framework, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(text)
    monkeypatch.setattr(sys, "orig_argv", ["python", *([str(program)] if text else []), *words])
    names = runpy.run_path(str(Path(warm_start.__file__).parent / "warm" / "sitecustomize.py"))
    request = names["_request"]()
    assert (request and request[0]) == framework


def test_signals_reach_the_fork(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready')\nsignal.pause()\n"
    )
    for number, status in ((signal.SIGTERM, 5), (signal.SIGUSR1, -signal.SIGUSR1), (signal.SIGKILL, -signal.SIGKILL)):
        command = [sys.executable, "-u", str(program)]
        with subprocess.Popen(command, env=warm(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.read() == ""  # the fork has ended
            assert process.wait() == status


def test_other_folders_on_pythons_path_are_kept(tmp_path):
    (tmp_path / "brought.py").write_text("VALUE = 3\n")
    line = "import torch, sys; import brought; print(brought.VALUE)"
    path = f"{warm()['PYTHONPATH']}:{tmp_path}"
    result = subprocess.run(
        [sys.executable, "-c", line], env={**warm(), "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.stdout == "3\n", result.stderr
