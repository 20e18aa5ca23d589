"""Training session: connects the engine with data, resuming, reports and checkpoints."""

import contextlib
import functools
import os
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
from allstep.common.base.errors import Fault, UserError
from allstep.common.base.terminal import note, warn
from allstep.common.base.version import VERSION
from allstep.common.checkpoint import Checkpoints, OutputDirectory, TrainState
from allstep.common.checkpoint.state import described
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.exact import environment_fingerprint, trace
from allstep.common.exact.replica_check import check_replicas_equal
from allstep.common.files.records import to_json
from allstep.common.launch.placement import Placement
from allstep.common.launch.variables import read_num_threads
from allstep.common.process.exit import EXIT_FAULT, note_failure, rank_name
from allstep.common.process.output import lasting_output
from allstep.common.recipe.progress import Progress
from allstep.common.recipe.schedule import Schedule, make_schedule
from allstep.common.reporting import Reporter
from allstep.common.reporting.base import write_whole
from allstep.common.training import earlier_run, engine, resuming, saving
from allstep.common.training.data_digest import digests_of
from allstep.common.training.description import Description, describe
from allstep.common.training.elastic import CONNECTIONS, HOSTS
from allstep.common.training.evaluation import Evaluation, Stopped, evaluate
from allstep.common.training.hooks import Check, Hook
from allstep.common.training.metrics import Metrics, build_metrics
from allstep.common.training.opening import check_batch_memory
from allstep.common.training.strategy import BaseStrategy
from allstep.common.training.worker import StepTrace, Worker
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

        The ranks watch each other meanwhile. SIGTERM, SIGUSR1 or SIGHUP to any rank stops all of them at the same
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

        `see` is that of `evaluation.evaluate`. Raises Fault if the ranks were asked to stop.
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
        worker, dataset, config, placement = self.worker, self.dataset, self.config, self.placement
        _ = self.validation_metrics  # before any step
        with contextlib.ExitStack() as cleanup:
            output = None
            if config.output.output_dir and placement.rank == 0:
                # A rank that leaves an elastic job may still be saving its last commit.
                wait = config.faults.fault_timeout if self.commits else 0.0
                output = cleanup.enter_context(OutputDirectory(config.output.output_dir, warn=warn, max_wait=wait))
            committed = self.commits.agree(worker.collectives) if self.commits else None
            data, description = {}, None
            if placement.rank == 0 and (output or config.output.resume):
                data, versions = digests_of(dataset), worker.versions()
                description = describe(config, dataset, framework=worker.framework, versions=versions)
            state = committed or self._load_state(data, description)
            if committed and placement.rank == 0:
                note(f"{placement.world_size} ranks go on after step {committed.progress.step}")
            schedule = make_schedule(
                config, len(dataset.train), _global_batch_size(config, worker.collectives.world_size, state)
            )
            check_batch_memory(schedule, dataset, placement)
            if state:
                self.progress = saving.resume(worker, state)
                if schedule.decay == state.schedule["decay"] == "plateau":
                    self.progress.lr_drops = tuple(state.schedule["milestones"] or ())
            if config.schedule.follows_noise:
                _follow_noise(self.progress, worker, state)
            for hook in self.hooks:
                if isinstance(hook, Check):
                    hook.check(self)
            checkpoints = None
            shapes = {name: described(shape) for name, shape in worker.state_shapes().items()}
            constants = {name for name, shape in shapes.items() if not shape.finite}
            if self.commits:
                self.commits.constants = constants
            if output:
                if not committed and not earlier_run.goes_on(config.output, output.path):
                    earlier_run.set_aside(output.path)
                _write_config(output.path, config, worker)
                checkpoints = Checkpoints(output, keep=config.output.keep_checkpoints, constants=constants)
                cleanup.callback(checkpoints.close)
                checkpoints.reserve({name: np.empty(shape, shape.dtype) for name, shape in shapes.items()})
            if config.parallel.slices and placement.rank == 0:
                threads = environment_fingerprint.describe(config, {})["threads"]
                note(f"threads of a rank with --slices: {threads}; bits depend on it")
                if config.parallel.audit and worker.collectives.world_size == 1:
                    note("--audit on one rank has it compute its own slices again")
            if config.parallel.trace:
                cleanup.callback(self._start_trace().close)
            reporter = self.open_reporter(config, placement.rank, self.progress)
            cleanup.callback(reporter.close)
            self._report_start(reporter, schedule)
            saver = saving.Saver(
                worker,
                schedule,
                config.flat(),
                environment_fingerprint.describe(config, worker.versions()),
                checkpoints,
                every=config.output.checkpoint_every,
                active=config.output.output_dir is not None,
                progress_state=progress_state,
                saved=self._report_saved,
                commits=self.commits,
                data=data,
                description=to_json(description) if description else {},
            )
            # After a failure, the pending checkpoint is still written; meanwhile this rank does not count as stuck.
            if not self.commits:
                cleanup.push(note_failure)
            return engine.fit(engine.Run(self, schedule, reporter, saver, progress_state))

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

    def _start_trace(self) -> StepTrace:
        worker, directory = self.worker, self.config.output.output_dir
        assert directory is not None  # `validate` asks for one
        worker.collectives.barrier()  # rank 0 has moved an earlier run out of the way

        def open_recorder(activations: Sequence[str], parameters: Sequence[str]) -> trace.Recorder:
            header = trace.Header(
                rank=self.placement.rank,
                world_size=self.placement.world_size,
                local_size=self.placement.local_size,
                framework=worker.framework,
                launcher=self.placement.launcher,
                host=platform.node(),
                processor=environment_fingerprint.processor(),
                device=self._device,
                num_threads=read_num_threads(os.environ),
                versions={"python": platform.python_version(), **worker.versions()},
                config=self.config.flat(),
                slices=self.config.parallel.num_slices,
                activations=tuple(activations),
                parameters=tuple(parameters),
            )
            return trace.Recorder(directory / trace.FOLDER, header, self.progress.step)

        return worker.trace(open_recorder)

    def _load_state(self, data: Mapping[str, str], description: Description | None) -> TrainState | None:
        """Return the state to resume, on every rank, or None; load weights of --init-from directly into the worker."""
        config, worker, output = self.config, self.worker, self.config.output
        if not (output.resume or output.init_from):
            return None
        state = None
        if self.placement.rank == 0:  # it checks all of it, so the other ranks receive valid state
            num_samples = len(self.dataset.train)
            state = resuming.load(config, num_samples, worker.state_shapes(), warn, data, description)
            now = environment_fingerprint.describe(config, worker.versions())
            if output.resume and (changed := environment_fingerprint.differences(now, state.versions)):
                warn(changed)
            if output.resume and state.progress.epoch == config.schedule.epochs:
                warn(
                    f"the checkpoint has all {state.progress.epoch} epochs, so none is trained; raise --epochs to go on"
                )
        state = saving.broadcast_state(state, worker.collectives)
        if output.resume:
            return state
        worker.import_state(state.arrays, step=0)
        return None

    def _report_saved(self) -> None:
        for hook in self.hooks:
            hook.on_save(self)


def _global_batch_size(config: TrainConfig, world_size: int, state: TrainState | None) -> int:
    """Return the global batch size of the flags; without them a resumed run keeps its size, on any number of ranks."""
    flags = config.schedule
    if state and flags.batch_size is None and flags.global_batch_size is None:
        return state.schedule["global_batch_size"]
    return config.global_batch_size(world_size)


def _follow_noise(progress: Progress, worker: Worker, state: TrainState | None) -> None:
    """Restore the growth of the global batch under --batch-ramp auto, which follows the gradient noise scale.

    Raises UserError if there is only one part of a batch, so the noise scale cannot be measured.
    """
    if not worker.num_parts:
        raise UserError(
            "expected two ranks, devices or passes at least with --batch-ramp auto, whose gradients are compared, "
            "received one; start more, or give --accumulate-steps 2"
        )
    if state and state.config.get("batch-ramp") == ["auto"]:
        progress.batch_ramp = tuple((epoch, factor) for epoch, factor in state.schedule["batch_ramp"])


def _write_config(directory: Path, config: TrainConfig, worker: Worker) -> None:
    import yaml

    text = yaml.safe_dump(config.flat(), sort_keys=False)
    if config.parallel.slices:
        depends = environment_fingerprint.describe(config, worker.versions())
        text += "# The bits of this run depend on these as well.\n"
        text += "".join(f"# {name}: {value}\n" for name, value in depends.items())
    write_whole(directory / "config.yaml", text)
