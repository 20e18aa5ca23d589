"""`allstep doctor` on this host. Oracle: its contract (docs/doctor.md); tests/cluster has several hosts."""

from __future__ import annotations

import json
import sys

from ranks import run

DOCTOR = (sys.executable, "-m", "allstep.commands.cli", "doctor", "--skip", "frameworks,all-reduce")


def test_writes_nothing_and_prints_no_secret(tmp_path):
    (tmp_path / "tmp").mkdir()
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "API_TOKEN": "hunter2"}
    result = run(*DOCTOR, "--json", **environ)
    assert result.returncode == 0, result.output
    content = json.loads(result.stdout)
    assert {one["level"] for one in content["findings"]} <= {"ok", "warning"}
    assert {"launchers", "compiler", "gpus", "cores", "memory", "disk"} <= {
        one["subject"] for one in content["findings"]
    }
    assert content["command"].startswith("horovodrun -np ")
    assert "hunter2" not in result.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_fault_comes_with_its_fix_and_status_1():
    """Folders in /proc cannot be written, and no disk space is counted there."""
    result = run(*DOCTOR, "--data-dir", "/proc/nowhere")
    assert result.returncode == 1, result.output
    [line] = [line for line in result.stdout.splitlines() if line.startswith("  fault")]
    assert "disk" in line and "/proc/nowhere" in line and line.count("; ") == 1
    assert "1 fault" in result.stdout and result.stdout.splitlines()[-1].startswith("  horovodrun -np ")
