"""Check which cells this machine cannot run, and why."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from allstep.commands.compare.cells import Cell, strategy_entry, trainers_name
from allstep.commands.shared.jobs import environment
from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import Fault


def unavailable(
    cells: Sequence[Cell], *, oversubscribe: bool = False, num_gpus: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the id of each cell that this machine cannot run, and why.

    Args:
        oversubscribe: whether ranks may share cores.
        num_gpus: GPUs of this machine, one for each rank; None if all cells train on CPUs.
    """
    num_cores, path = len(os.sched_getaffinity(0)), environment()["PATH"]
    reasons = {framework: _reasons(framework) for framework in dict.fromkeys(cell.framework for cell in cells)}
    for cell in cells:
        start = strategy_entry(cell)
        if reason := reasons[cell.framework].get(trainers_name(cell.strategy)):
            yield cell.id, reason
        elif start.launcher and shutil.which(start.launcher, path=path) is None:
            yield cell.id, f"expected {start.launcher} on the path, received none; run {setup_command()}"
        elif num_gpus is not None and cell.ranks > num_gpus:
            yield (
                cell.id,
                f"expected at most a rank for each of the {num_gpus} GPUs, received {cell.ranks} ranks; --device cpu "
                "trains on CPUs",
            )
        elif cell.ranks > num_cores and not oversubscribe:
            yield (
                cell.id,
                f"expected at most a rank for each of the {num_cores} cores, received {cell.ranks} ranks; "
                "--oversubscribe lets them share cores",
            )


def _reasons(framework: str) -> dict[str, str]:
    """Return why this machine cannot run strategies of a framework, as reported by the trainer's --list-strategies."""
    command = [sys.executable, "-m", f"allstep.{framework}.train", "--list-strategies"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if result.returncode:
        raise Fault(f"{shlex.join(command)} failed: {result.stderr.strip()}")
    listed = (line.partition("not available: ") for line in result.stdout.splitlines())
    return {name.strip(): reason for name, separator, reason in listed if separator}
