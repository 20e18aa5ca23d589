"""Train again up to one step, from the nearest checkpoint before it, in a folder of its own.

    horovodrun -np 2 python -m allstep.commands.bisect.replay pytorch 12 [flags of train.py]

is what `replay` starts: a trainer that stops after step 12.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.commands.shared.jobs import running
from allstep.commands.shared.launchers import LAUNCHERS, start
from allstep.common.checkpoint.select import scan
from allstep.common.exact import trace
from allstep.common.exact.trace import Header, Trace
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook, StopTraining

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

_SECONDS = 3600
# What a replay leaves out: where the run wrote, and how it began.
_GIVEN_FLAGS = ("output-dir", "timeline", "tensorboard", "resume", "init-from", "checkpoint-every", "log-every")


class NotReplayed(Exception):
    """The message says why."""


def replay(output_dir: Path, header: Header, step: int) -> Trace:
    """The trace of a replay of the run that `output_dir` holds; nothing is written there.

    Raises:
        NotReplayed: it cannot be started here, or has failed.
    """
    if header.local_size != header.world_size:
        raise NotReplayed(f"it was on several hosts, and {header.world_size} ranks are more than this one had")
    launcher = None if header.launcher == "allstep" else header.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        raise NotReplayed(f"it was started by {launcher}")
    readable, _ = scan(output_dir / "checkpoints")
    before = [(manifest.progress.step, path) for path, manifest in readable if manifest.progress.step < step]
    config = {name: value for name, value in header.config.items() if name not in _GIVEN_FLAGS}
    if before:
        config["resume"] = str(max(before)[1].absolute())
    elif header.config["resume"]:
        raise NotReplayed(f"it was resumed, and has no checkpoint before step {step}")
    elif header.config["init-from"]:
        config["init-from"] = header.config["init-from"]
    config["device"] = header.device
    with tempfile.TemporaryDirectory(prefix="allstep-bisect-") as folder:
        flags = _write_flags(Path(folder) / "flags.yaml", config)
        program = (
            "-m",
            "allstep.commands.bisect.replay",
            header.framework,
            step,
            "--config",
            flags,
            "--output-dir",
            Path(folder) / "run",
        )
        threads = None if header.num_threads is None else str(header.num_threads)
        with running((*start(launcher, header.world_size), *program), environ={"OMP_NUM_THREADS": threads}) as job:
            try:
                status = job.wait(_SECONDS)
            except TimeoutError:
                raise NotReplayed(f"it took over {_SECONDS} s") from None
            if status:
                causes = [line for line in job.printed().splitlines() if "allstep: " in line and "warning" not in line]
                raise NotReplayed(causes[-1] if causes else f"it ended with status {status}")
        return trace.read(Path(folder) / "run")


def _write_flags(path: Path, config: dict) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(config))
    return path


@dataclasses.dataclass(frozen=True)
class _StopAfter(Hook):
    step: int

    def on_step(self, session: TrainingRun) -> None:
        if session.progress.step >= self.step:
            raise StopTraining


def main(argv: Sequence[str] | None = None) -> None:
    """Train as a rank of the replay."""
    from allstep.commands.shared.rank import open_session

    framework, step, *arguments = sys.argv[1:] if argv is None else argv
    if session := open_session(framework, arguments):
        dataclasses.replace(session, hooks=[*session.hooks, _StopAfter(int(step))]).train()


if __name__ == "__main__":
    run_rank(main)
