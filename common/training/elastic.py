"""Elastic jobs: training goes on when ranks are lost, and when others join.

Under horovodrun, ranks keep their processes. Each rank keeps the newest commit in memory. When ranks are lost, the
remaining ones form a new job, agree on the newest commit of any of them, and go on from its position. When hosts join
or leave without a failure, the ranks stop after the same step, commit, and form the new job. Order, slices and learning
rate are functions of the position, so each sample counts once per epoch in any case.

Under torchrun, agents restart all ranks, which resume from the newest checkpoint in the output directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allstep.common.base.compat import wait_without_polling
from allstep.common.base.errors import Fault, RanksLost, UserError, note
from allstep.common.cli.strategy_flags import launcher_name
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.launch.placement import GLOO_STORE, Placement
from allstep.common.process.exit import EXIT_FAULT, is_consequence, leave, rank_name
from allstep.common.process.lean_import import stderr_held_back
from allstep.common.process.suspend_watchdog import end_when_frozen

if TYPE_CHECKING:
    from allstep.common.training.saving import Commits
    from allstep.common.training.training_run import TrainingRun
from pathlib import Path


class Connections:
    """Sockets that were opened inside a block."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # names by the kernel, because descriptors may be reused

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the sockets that the block opens, and forget those noted before."""
        before = set(_sockets())
        yield
        self._names = set(_sockets()) - before

    def end(self) -> None:
        """Shut down the noted sockets that are still open; threads and processes at both ends get an error."""
        for name, descriptor in _sockets().items():
            if name in self._names:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)  # a listener, or one that has ended, refuses


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by the kernel's names."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            name = os.readlink(entry)
            if name.startswith("socket:"):
                sockets[name] = int(entry.name)
    return sockets


# Message of Horovod 0.28.1 when this rank's host is no longer part of the job.
_REMOVED = "has been removed from elastic job"
_PATIENCE_SECONDS = 10
"""Time limit to connect to horovodrun; a host that takes longer is cut off from it."""


def check(config: TrainConfig, placement: Placement, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse --elastic in a job that its launcher does not restart, and an elastic job without the flag.

    The message tells how to start an elastic job.
    """
    by_horovodrun = environ.get("HOROVOD_ELASTIC") == "1"
    if not config.parallel.elastic:
        if by_horovodrun:
            raise UserError(
                "expected --elastic in an elastic job, or a job of a fixed number of ranks, received an elastic one "
                "without; give the flag, or leave --min-np, --max-np and --host-discovery-script out"
            )
        return
    if config.strategy_name == "horovod":
        if not by_horovodrun:
            raise UserError(
                "expected an elastic job of horovodrun with --elastic --strategy horovod, received "
                f"{launcher_name(placement)}; start it by horovodrun --min-np N --host-discovery-script FILE"
            )
    elif placement.launcher != "torchrun" or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        raise UserError(
            f"expected torchrun with --max-restarts for --elastic --strategy {config.strategy_name}, received "
            f"{launcher_name(placement)}{' without it' if placement.launcher == 'torchrun' else ''}; start it by "
            "torchrun --max-restarts 100"
        )
    elif config.output.output_dir is None:
        raise UserError(
            "expected --output-dir with --elastic under torchrun, received none; name a directory that all hosts "
            "share, since restarted ranks resume from its checkpoints"
        )
    elif environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # In that store restarted ranks find the addresses of lost ones and wait for them forever, and a host that
        # becomes the first has a different store (https://github.com/pytorch/pytorch/issues/135712, torch 2.14).
        raise UserError(
            "expected a separate store for ranks that torchrun restarts with --elastic, received its agents', "
            "where they would wait for ranks that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, "
            "with --rdzv-backend c10d"
        )
    if config.schedule.global_batch_size is None:
        raise UserError(
            "expected --global-batch-size with --elastic, since the number of ranks changes and the run shall not, "
            "received none; give it"
        )


def with_newest_checkpoint(config: TrainConfig) -> TrainConfig:
    """Return the configuration for ranks that torchrun may have restarted: they resume the newest checkpoint."""
    if not config.parallel.elastic or config.strategy_name == "horovod" or config.output.resume:
        return config
    return dataclasses.replace(config, output=dataclasses.replace(config.output, resume="auto"))


def train(config: TrainConfig, build: Callable[[], TrainingRun | None]) -> None:
    """Train to the end, with the ranks that exist at each moment.

    `build` forms the job again and returns its session; None in a process that has only served other ranks.
    """
    end_when_frozen(config.faults.fault_timeout)
    if config.strategy_name != "horovod":
        if session := build():
            session.train()
        return
    from allstep.common.training.saving import Commits

    commits, is_first = Commits(config.parallel.commit_every), False
    while True:
        try:
            session = build()
            assert session is not None  # ranks of Horovod all train
            session.commits, is_first = commits, session.placement.rank == 0
            if session.train():
                return
        except Exception as error:
            cause = error.__cause__ if type(error) is Fault else error
            if cause is None or not (isinstance(cause, RanksLost) or is_consequence(cause)):
                raise
            CONNECTIONS.end()
            _save(commits, config.output, speaks=is_first)
        session = None


class _Hosts:
    """Listener for notifications of horovodrun: changes of the hosts, and signals to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._have_changed = False
        self._ask_to_stop: Callable[[str], None] | None = None

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        """Ask the ranks to stop; called by a thread of Horovod on rank 0 when hosts join or leave."""
        with self._lock:
            self._have_changed = True
            self._ask()

    def on_stop(self, number: int) -> bool:
        """Ask the ranks to stop and save; called by a thread of Horovod on rank 0 when horovodrun receives a signal.

        Returns: whether the ranks stop and save; while the job is being formed, the newest commit is saved as it is.
        """
        with self._lock:
            if self._ask_to_stop:
                self._ask_to_stop(signal.Signals(number).name)
            return self._ask_to_stop is not None

    @contextlib.contextmanager
    def passing_on(self, ask_to_stop: Callable[[str], None]) -> Iterator[None]:
        """Stop the ranks for a change of hosts while the block runs, or at once if there was one before."""
        with self._lock:
            self._ask_to_stop = ask_to_stop
            self._ask()
        try:
            yield
        finally:
            with self._lock:
                self._ask_to_stop = None

    def _ask(self) -> None:
        from allstep.common.watch import HOSTS_CHANGED

        if self._have_changed and self._ask_to_stop:
            # Later notifications are changes with respect to the hosts of the next job.
            self._have_changed = False
            self._ask_to_stop(HOSTS_CHANGED)


HOSTS = _Hosts()
CONNECTIONS = Connections()
"""Horovod's connections."""


def form_anew(horovod: ModuleType, notifications: Any, placement: Placement) -> Placement:
    """Initialise Horovod with the ranks that exist now, and return this rank's placement among them.

    Raises RanksLost if expected ranks are missing (try again), SystemExit if this host is no longer part of the job, or
    is cut off from it.

    Args:
        horovod: `horovod.torch`, or the drop-in for Keras.
        notifications: Horovod's notification manager, with which to register `HOSTS`.
    """
    horovod.shutdown()  # orderly if no rank is lost, because all ranks do it
    CONNECTIONS.end()
    _leave_if_cut_off(placement)
    with stderr_held_back() as held:
        try:
            with CONNECTIONS.noted():
                horovod.init()
            _listen(notifications)
            return dataclasses.replace(
                placement,
                rank=horovod.rank(),
                world_size=horovod.size(),
                local_rank=horovod.local_rank(),
                local_size=horovod.local_size(),
                cross_rank=horovod.cross_rank(),
            )
        except ValueError as error:
            sys.stderr.flush()
            held.seek(0)
            if _REMOVED in held.read().decode(errors="replace"):
                leave(0, "")
            raise RanksLost(f"the job could not be formed again: {error}") from None


def _listen(notifications: Any) -> None:
    """Register `HOSTS` with Horovod's notification manager, for changes of the hosts."""
    is_new = notifications._service is None
    notifications.init()
    notifications.register_listener(HOSTS)
    if is_new:
        wait_without_polling(notifications._service)


def _leave_if_cut_off(placement: Placement) -> None:
    """End this rank if it cannot reach horovodrun, which forms the job without it.

    Otherwise it would come back when the link does, after another process has taken its rank.
    """
    host, port = (os.environ[name] for name in GLOO_STORE)
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        leave(EXIT_FAULT, f"allstep: {rank_name(placement)} stopped: it does not reach horovodrun ({error})")


def _save(commits: Commits, output: OutputConfig, *, speaks: bool) -> None:
    """Write the newest commit before the job waits for ranks, because horovodrun ends the job if too few join.

    If it is saved already, the rank that `speaks` prints a line; else the remaining rank that gets the lock of the
    output directory writes it and prints the line.
    """
    from allstep.common.checkpoint import Checkpoints, OutputDirectory
    from allstep.common.checkpoint.files import checkpoint_name

    newest = commits.newest
    if newest is None or output.output_dir is None:
        return
    step = newest.progress.step
    line = (
        f"step {step} is saved while the job is formed again; if too few ranks join, --resume latest goes on from there"
    )
    folder = output.output_dir / "checkpoints" / checkpoint_name(step)
    if folder.exists():
        if speaks:
            note(line)
        return
    with contextlib.suppress(UserError), OutputDirectory(output.output_dir, warn=lambda _: None) as directory:
        if not folder.exists():
            checkpoints = Checkpoints(directory, keep=output.keep_checkpoints, constants=commits.constants)
            checkpoints.save(newest)
            checkpoints.close()
            note(line)
