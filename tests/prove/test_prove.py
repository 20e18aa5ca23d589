"""The command `allstep prove`: its output, its status, and that it does not change the files of a script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from mistake import Mistake, check
from prove_corpus import SCRIPTS
from ranks import REPOSITORY, run

from allstep.commands.prove.command import _launcher
from allstep.commands.prove.launching import ITSELF

_NEVER = "import torch\nprint(torch.ones(1))\n"
_FAILS = "import torch\nraise RuntimeError('no data here')\n"


_ALONE = """import torch  # and no torch.multiprocessing.spawn()
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
(weight * 2).backward()
optimizer.step()
"""
_SHARED = _ALONE.replace("zeros(1, requires_grad=True)", "zeros(1).share_memory_().requires_grad_()")
_FILES = """
from pathlib import Path
old, new = Path({folder!r}, "old"), Path({folder!r}, "new")
assert old.read_text() == "before" and not new.exists()
"""
_WRITES = """
    old.write_text(f"after {size}")
    new.with_suffix(".part").write_text(f"after {size}")
    new.with_suffix(".part").replace(new)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.multiprocessing.start_processes(main, nprocs=2, start_method='fork')", ITSELF),
        ("from torch.multiprocessing import Queue, spawn\nspawn(main, nprocs=2)", ITSELF),
        ("os.environ['MASTER_ADDR'] = 'localhost'\nimport torch\nmp.Process(target=main, args=(0, 2)).start()", ITSELF),
        ("import torch\nprint(os.environ['MASTER_ADDR'])\nProcess(target=read).start()", "torchrun"),
    ],
)
def test_the_text_of_a_script_tells_who_starts_its_ranks(text, expected):
    assert _launcher(Path("script.py"), text) == expected


def test_the_command_says_what_is_wrong(tmp_path):
    """The ranks of this script do not average: status 1, a name, a line, and the fix.

    Several ranks find the same files as the run on one rank, and the files that several ranks write are kept. The path
    of the script begins above the folder.
    """
    script, old, new = (tmp_path / name for name in ("script.py", "old", "new"))
    old.write_text("before")
    text = (SCRIPTS / "horovod_own_loop.py").read_text()
    text = text.replace("hvd.allreduce(parameter.grad)", "parameter.grad")
    script.write_text(_FILES.format(folder=str(tmp_path)) + text + _WRITES)
    command = (sys.executable, "-m", "allstep.commands.cli", "prove", "--launcher", "horovodrun-mpi", "--steps", "3")
    result = run(*command, os.path.relpath(script, REPOSITORY), timeout=600)
    assert result.returncode == 1, result.output
    assert "1. gradients-not-averaged (script.py:" in result.stdout
    assert "mend: optimizer = hvd.DistributedOptimizer" in result.stdout
    assert "not looked at: validation" in result.stdout
    assert old.read_text() == new.read_text() == "after 2"


def test_the_report_as_json_names_the_line_of_a_failure(tmp_path):
    """The ranks do not average, and then fail where several ranks end."""
    script = tmp_path / "script.py"
    text = (SCRIPTS / "horovod_own_loop.py").read_text().replace("hvd.allreduce(parameter.grad)", "parameter.grad")
    script.write_text(f"{text}if size > 1:\n    raise RuntimeError('no room')\n")
    command = (sys.executable, "-m", "allstep.commands.cli", "prove", "--launcher", "horovodrun-mpi", "--steps", "3")
    result = run(*command, "--json", script, timeout=600)
    assert result.returncode == 1, result.output
    report = json.loads(result.stdout)
    lines = script.read_text().splitlines()
    [found] = report["found"]
    assert (found["name"], found["line"]) == (
        "gradients-not-averaged",
        f"script.py:{lines.index('    optimizer.step()') + 1}",
    )
    assert report["failure"] == f"RuntimeError: no room (script.py:{len(lines)})"
    assert (report["ranks"], report["steps"], report["steps_alone"]) == (2, 12, 12)
    assert "validation" in report["not_looked_at"]


@pytest.mark.parametrize(
    ("text", "received"),
    [
        pytest.param(_NEVER, "a script that ended without a step", marks=pytest.mark.full),
        pytest.param(_ALONE, "one; give it several", marks=pytest.mark.full),
        pytest.param(_SHARED, "memory that processes share", marks=pytest.mark.full),
        pytest.param(_FAILS, "its failure: RuntimeError: no data here", marks=pytest.mark.full),
        ("def f(:\n", "which is none: invalid syntax"),
        ("print(1)\n", "without a word of them"),
        (None, "No such file"),
    ],
)
def test_a_script_that_cannot_be_looked_at(text, received, tmp_path):
    def prepare(folder):
        if text is not None:
            (folder / "script.py").write_text(text)

    check(
        Mistake(f"{sys.executable} -m allstep.commands.cli prove script.py", "script", received, prepare=prepare),
        tmp_path,
    )
