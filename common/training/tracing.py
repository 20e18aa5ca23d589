"""Start of a trace (--trace): each rank's file, whose header says what its numbers depend on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allstep.common.exact import environment_fingerprint, trace
from allstep.common.launch.variables import read_num_threads

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun
    from allstep.common.training.worker import StepTrace


def start_trace(run: TrainingRun, device: str) -> StepTrace:
    """Have the steps of `run` on this rank's `device` recorded in its output directory, until the result is closed."""
    worker, placement, config = run.worker, run.placement, run.config
    directory = config.output.output_dir
    assert directory is not None  # `validate` asks for one
    worker.collectives.barrier()  # rank 0 has moved an earlier run out of the way

    def open_recorder(activations: Sequence[str], parameters: Sequence[str]) -> trace.Recorder:
        header = trace.Header(
            rank=placement.rank,
            world_size=placement.world_size,
            local_size=placement.local_size,
            framework=worker.framework,
            launcher=placement.launcher,
            host=platform.node(),
            processor=environment_fingerprint.processor(),
            device=device,
            num_threads=read_num_threads(os.environ),
            versions={"python": platform.python_version(), **worker.versions()},
            config=config.flat(),
            slices=config.parallel.num_slices,
            activations=tuple(activations),
            parameters=tuple(parameters),
        )
        return trace.Recorder(directory / trace.FOLDER, header, run.progress.step)

    return worker.trace(open_recorder)
