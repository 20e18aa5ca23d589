"""Training session: connects the engine with data, resuming, reports and checkpoints."""

import contextlib
import functools
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from allstep.common import reporting
from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import Fault, note, warn
from allstep.common.base.version import VERSION
from allstep.common.checkpoint import Checkpoints, OutputDirectory
from allstep.common.checkpoint.state import described
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.exact import environment_fingerprint
from allstep.common.exact.replica_check import check_replicas_equal
from allstep.common.launch.placement import Placement
from allstep.common.process.exit import EXIT_FAULT, note_failure, rank_name
from allstep.common.process.output import lasting_output
from allstep.common.recipe.progress import Progress
from allstep.common.recipe.schedule import Schedule
from allstep.common.reporting import Reporter
from allstep.common.reporting.base import write_whole
from allstep.common.training import beginning, engine, saving
from allstep.common.training.beginning import start_trace
from allstep.common.training.description import Description, describe
from allstep.common.training.elastic import CONNECTIONS, HOSTS
from allstep.common.training.hooks import Check, Hook
from allstep.common.training.metrics import Evaluation, Metrics, Stopped, build_metrics, evaluate
from allstep.common.training.same_on_ranks import digests_of
from allstep.common.training.strategy import BaseStrategy
from allstep.common.training.worker import Worker
from allstep.common.watch import HOSTS_CHANGED, Limits, ProgressState, watching

if TYPE_CHECKING:
    from allstep.common.data.images.encoded import EncodedSplit

# Keepalive of Open MPI's daemons (tools/setup_environment.py), plus the time that mpirun takes to end the ranks.
MPIRUN_NOTICES_SECONDS = 30.0
_MAX_CHARACTERS = 4000  # of the names of classes in an event: trackers take no longer values


@dataclass
class TrainingRun:
    """Run that is ready to train; `dataclasses.replace` exchanges parts of it."""

    worker: Worker
    dataset: Dataset
    config: TrainConfig
    strategy: BaseStrategy
    hooks: Sequence[Hook] = ()
    """User callbacks, called in this order."""
    progress: Progress = field(default_factory=Progress)
    """Progress of the run."""
    open_reporter: Callable[[TrainConfig, int, Progress], Reporter] = reporting.open_reporter
    """Function that returns the reporter for a configuration, a rank and the progress at the start."""
    commits: saving.Commits | None = None
    """Commits of an elastic job, which outlive this session."""
    check_replicas: Callable[[Iterable[tuple[str, np.ndarray]], Collectives, str], None] = check_replicas_equal
    """Function that compares weights across ranks after the broadcast, after step 1 and after each epoch."""
    watching: Callable[..., contextlib.AbstractContextManager[Callable[[str], None]]] = watching
    """Function that has the ranks watch each other; see `common.watch.watching`."""

    @property
    def placement(self) -> Placement:
        """Placement of this rank in the job."""
        return self.strategy.placement

    @functools.cached_property
    def validation_metrics(self) -> Metrics:
        """Metrics of validation in addition to the loss."""
        return build_metrics(self.config, self.dataset)

    def train(self) -> bool:
        """Train as configured, from the start or from a checkpoint; only rank 0 reads and writes files.

        The ranks watch each other meanwhile. A signal of `spawn.NOTICES` to any rank stops all of them at the same
        point, with a checkpoint. The result tells whether training is done; if not, an elastic job's hosts have
        changed, and it must be formed again. Raises UserError if the output directory cannot be written, or the
        checkpoint cannot be resumed; Fault if the run cannot go on, or was stopped without an output directory to save
        to.
        """
        progress_state, placement, config = ProgressState(), self.placement, self.config
        with self._watched(progress_state) as ask_to_stop:
            with HOSTS.passing_on(ask_to_stop), lasting_output():
                is_done = self._train(progress_state)
            if is_done:
                return True
            if progress_state.notice == HOSTS_CHANGED:
                return False
            if config.output.output_dir is None:
                stopped = f"{progress_state.notice} after step {progress_state.step}"
                raise Fault(f"{stopped}; nothing is saved without --output-dir")
            if placement.rank == 0:
                stopped = f"{rank_name(placement)} stopped after step {progress_state.step} by {progress_state.notice}"
                note(f"{stopped}; resumable: --resume latest goes on from here")
        if config.parallel.elastic and not self.commits and progress_state.notice == signal.SIGTERM.name:
            # A torchrun agent sent it because hosts join or leave; status 0 would tell the agent that training is done.
            sys.exit(EXIT_FAULT)
        return True

    def evaluate(self, see: Callable[[Batch, np.ndarray], None]) -> Evaluation:
        """Evaluate the worker's weights on the validation samples, while the ranks watch each other.

        `see` is that of `metrics.evaluate`. Raises Fault if the ranks were asked to stop.
        """
        progress_state, metrics = ProgressState(), self.validation_metrics
        batch = self.config.global_batch_size(self.worker.collectives.world_size)
        with self._watched(progress_state), lasting_output():
            try:
                return evaluate(self.worker, self.dataset.validation, batch, progress_state, metrics, see=see)
            except Stopped:
                raise Fault(f"{progress_state.notice} during the evaluation; nothing is written") from None

    def _watched(self, progress_state: ProgressState) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Return a context in which the ranks watch each other; it yields a function that asks all of them to stop."""
        # With asynchronous steps, ranks have no common step, and the strategy watches its processes itself.
        collectives = self.worker.collectives if self.strategy.steps_in_flight == 1 else None
        limits = Limits(
            stall=self.config.faults.stall_timeout,
            silence=self.config.faults.fault_timeout,
            elastic=self.commits is not None,
            launcher=MPIRUN_NOTICES_SECONDS if self.placement.launcher == "mpirun" else 0.0,
        )
        pending = self.worker.pending_tensors
        return self.watching(collectives, self.placement, progress_state, limits, pending, sever=CONNECTIONS.end)

    @property
    def _device(self) -> str:
        return "cpu" if self.strategy.gpu is None else "cuda"

    def metrics(self) -> Mapping[str, float]:
        """Return the strategy's metrics, and the number of files that any rank could not read; all ranks call it."""
        metrics = self.strategy.metrics()
        splits = [getattr(split, "whole", split) for split in (self.dataset.train, self.dataset.validation)]
        if not self.config.data.skip_unreadable or not hasattr(splits[0], "unreadable_mask"):
            return metrics
        masks = np.concatenate([cast("EncodedSplit", split).unreadable_mask() for split in splits])
        return {**metrics, "unreadable_images": int(np.count_nonzero(self.worker.collectives.all_reduce_sum(masks)))}

    def _train(self, progress_state: ProgressState) -> bool:
        """Train until all files are written, and return the result of `engine.fit`."""
        worker, config, commits = self.worker, self.config, self.commits
        _ = self.validation_metrics  # before any step
        with contextlib.ExitStack() as cleanup:
            output = self._open_output(cleanup)
            committed = commits.agree(worker.collectives) if commits else None
            data, description = self._what_is_trained() if output or config.output.resume else ({}, None)
            if committed and self.placement.rank == 0:
                note(f"{self.placement.world_size} ranks go on after step {committed.progress.step}")
            schedule = beginning.begin(self, committed or beginning.load_state(self, data, description))
            for hook in self.hooks:
                if isinstance(hook, Check):
                    hook.check(self)
            checkpoints = self._open_checkpoints(cleanup, output, goes_on=committed is not None)
            self._note_threads()
            if config.parallel.trace:
                cleanup.callback(start_trace(self, self._device).close)
            reporter = self.open_reporter(config, self.placement.rank, self.progress)
            cleanup.callback(reporter.close)
            self._report_start(reporter, schedule)
            saver = saving.Saver(self, schedule, checkpoints, progress_state, data=data, description=description)
            # After a failure, the pending checkpoint is still written; meanwhile this rank does not count as stuck.
            if not commits:
                cleanup.push(note_failure)
            return engine.fit(engine.Run(self, schedule, reporter, saver, progress_state))

    def _open_output(self, cleanup: contextlib.ExitStack) -> OutputDirectory | None:
        """Open the output directory until `cleanup`; None on other ranks than 0, and if the run has none."""
        config = self.config
        if not config.output.output_dir or self.placement.rank != 0:
            return None
        # A rank that leaves an elastic job may still be saving its last commit.
        wait = config.faults.fault_timeout if self.commits else 0.0
        return cleanup.enter_context(OutputDirectory(config.output.output_dir, warn=warn, max_wait=wait))

    def _what_is_trained(self) -> tuple[Mapping[str, str], Description | None]:
        """Return what checkpoints tell of the run: digests of its data, and its description; nothing on other ranks."""
        if self.placement.rank != 0:
            return {}, None
        data, versions = digests_of(self.dataset), self.worker.versions()
        return data, describe(self.config, self.dataset, framework=self.worker.framework, versions=versions)

    def _open_checkpoints(
        self, cleanup: contextlib.ExitStack, output: OutputDirectory | None, *, goes_on: bool
    ) -> Checkpoints | None:
        """Return the checkpoints in `output`, closed by `cleanup`, with room for the first one.

        An earlier run there is moved out of the way, unless this one `goes_on` or resumes it.
        """
        shapes = {name: described(shape) for name, shape in self.worker.state_shapes().items()}
        constants = {name for name, shape in shapes.items() if not shape.finite}
        if self.commits:
            self.commits.constants = constants
        if output is None:
            return None
        if not goes_on and not beginning.goes_on(self.config.output, output.path):
            beginning.set_aside(output.path)
        _write_config(output.path, self.config, self.worker)
        checkpoints = Checkpoints(output, keep=self.config.output.keep_checkpoints, constants=constants)
        cleanup.callback(checkpoints.close)
        checkpoints.reserve({name: np.empty(shape, shape.dtype) for name, shape in shapes.items()})
        return checkpoints

    def _note_threads(self) -> None:
        """Tell on rank 0 on what the bits of --slices depend."""
        config = self.config
        if config.parallel.slices and self.placement.rank == 0:
            threads = environment_fingerprint.describe(config, {})["threads"]
            note(f"threads of a rank with --slices: {threads}; bits depend on it")
            if config.parallel.audit and self.worker.collectives.world_size == 1:
                note("--audit on one rank has it compute its own slices again")

    def _report_start(self, reporter: Reporter, schedule: Schedule) -> None:
        worker, classes = self.worker, self.dataset.class_names
        reporter.event(
            "start",
            framework=worker.framework,
            strategy=self.config.strategy,
            device=self._device,
            launcher=self.placement.launcher,
            world_size=self.placement.world_size,
            local_size=self.placement.local_size,
            versions={"allstep": VERSION, "python": platform.python_version(), **worker.versions()},
            global_batch_size=schedule.global_batch_size,
            parameter_count=sum(array.size for array in worker.export_weights().values()),
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **({"classes": classes} if 0 < sum(map(len, classes)) <= _MAX_CHARACTERS else {}),
        )


def _write_config(directory: Path, config: TrainConfig, worker: Worker) -> None:
    import yaml

    text = yaml.safe_dump(config.flat(), sort_keys=False)
    if config.parallel.slices:
        depends = environment_fingerprint.describe(config, worker.versions())
        text += "# The bits of this run depend on these as well.\n"
        text += "".join(f"# {name}: {value}\n" for name, value in depends.items())
    write_whole(directory / "config.yaml", text)
