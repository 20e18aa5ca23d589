"""Train a run again up to one step, from the nearest checkpoint before it, in a temporary folder.

    horovodrun -np 2 python -m allstep.commands.bisect.replay pytorch 12 [flags of train.py]

is the kind of command that `replay` starts: a trainer that stops after the given step, here 12.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.commands.shared.jobs import LAUNCHERS, running, scratch_folder, start
from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import max_local_ranks
from allstep.common.catalog import user_file
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.checkpoint.select import scan
from allstep.common.exact import trace
from allstep.common.exact.trace import Header, Trace
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook, StopTraining

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

_SECONDS = 3600
# Flags of the run that a replay omits: those on its outputs, on how it started, and on what it tells other machines.
_NOT_REPEATED = (
    *("output-dir", "timeline", "tensorboard", "resume", "init-from", "checkpoint-every", "log-every"),
    *("metrics", "best-by", "mlflow", "wandb", "mirror"),
)


def replay(output_dir: Path, header: Header, step: int, code: Sequence[str] = ()) -> Trace:
    """Replay the run in `output_dir` up to `step` and return the trace; nothing is written to `output_dir`.

    `code` is the FILE.py:FUNCTION that the user has named; a run directory is data, and its other files are not
    imported. Raises UserError if the replay cannot be started on this machine, or has failed.
    """
    import yaml

    if header.framework not in FRAMEWORKS:
        raise UserError(f"its framework is {quote(header.framework)}")
    if header.local_size != header.world_size:
        raise UserError(f"it was on several hosts, and {header.world_size} ranks are more than this one had")
    if header.world_size > max_local_ranks():
        raise UserError(f"it had {header.world_size} ranks, and this host runs at most {max_local_ranks()}")
    launcher = None if header.launcher == "allstep" else header.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        raise UserError(f"it was started by {quote(launcher)}")
    readable, _ = scan(output_dir / "checkpoints")
    before = [(manifest.progress.step, path) for path, manifest in readable if manifest.progress.step < step]
    repeated = {name: value for name, value in header.config.items() if name not in _NOT_REPEATED}
    config = user_file.trusted_flags(repeated, code)
    if before:
        config["resume"] = str(max(before)[1].absolute())
    elif header.config.get("resume"):
        raise UserError(f"it was resumed, and has no checkpoint before step {step}")
    elif init_from := header.config.get("init-from"):
        config["init-from"] = init_from
    config["device"] = header.device
    with scratch_folder("bisect") as folder:
        flags = folder / "flags.yaml"
        flags.write_text(yaml.safe_dump(config))
        program = ("-m", "allstep.commands.bisect.replay", header.framework, step)
        program += ("--config", flags, "--output-dir", folder / "run")
        threads = None if header.num_threads is None else str(header.num_threads)
        with running((*start(launcher, header.world_size), *program), environ={"OMP_NUM_THREADS": threads}) as job:
            try:
                status = job.wait(_SECONDS)
            except TimeoutError:
                raise UserError(f"it took over {_SECONDS} s") from None
            if status:
                raise UserError(job.outcome("failed", f"it ended with status {status}", 0.0).reason)
        return trace.read(folder / "run")


@dataclasses.dataclass(frozen=True)
class _StopAfter(Hook):
    step: int

    def on_step(self, session: TrainingRun) -> None:
        if session.progress.step >= self.step:
            raise StopTraining


def main(argv: Sequence[str] | None = None) -> None:
    """Train as one rank of a replay."""
    from allstep.commands.shared.rank import open_session

    framework, step, *arguments = sys.argv[1:] if argv is None else argv
    if session := open_session(framework, arguments):
        dataclasses.replace(session, hooks=[*session.hooks, _StopAfter(int(step))]).train()


if __name__ == "__main__":
    run_rank(main)
