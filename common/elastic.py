"""Elastic jobs: training goes on when ranks are lost, and when others join.

Under horovodrun a rank stays the same process. Each keeps the newest commit in memory; when others are lost it forms a
new job with those that are left, all agree on the newest commit of any of them, and go on from its position. When
hosts come or go nobody is lost: the ranks stop after the same step, commit, and form the new job. Order, slices and
learning rate are functions of the position, so that each sample counts once an epoch whatever happens.

Under torchrun its agents start all ranks anew, which go on from the newest checkpoint in the output directory.
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

from allstep.common.compat import wait_without_polling
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.launch.placement import GLOO_STORE, Placement
from allstep.common.process.connections import Connections
from allstep.common.process.errors import Fault, RanksLost, UserError
from allstep.common.process.exit import EXIT_FAULT, is_consequence, leave, who
from allstep.common.process.frozen import end_when_frozen
from allstep.common.process.lean_import import stderr_held_back
from allstep.common.process.terminal import print_line
from allstep.common.strategies import named

if TYPE_CHECKING:
    from allstep.common.checkpoint.saving import Commits
    from allstep.common.session import Session

# What Horovod 0.28.1 writes where this rank's host is no longer one of the job's.
_REMOVED = "has been removed from elastic job"
_PATIENCE_SECONDS = 10
"""In which a host that is not cut off reaches horovodrun."""


def check(config: TrainConfig, place: Placement, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse --elastic where nothing keeps the job going, and an elastic job without it.

    Raises:
        UserError: says how to start one.
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
                f"{named(place)}; start it by horovodrun --min-np N --host-discovery-script FILE"
            )
    elif place.launcher != "torchrun" or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        raise UserError(
            f"expected torchrun with --max-restarts for --elastic --strategy {config.strategy_name}, received "
            f"{named(place)}{' without it' if place.launcher == 'torchrun' else ''}; start it by torchrun "
            "--max-restarts 100"
        )
    elif config.output.output_dir is None:
        raise UserError(
            "expected --output-dir with --elastic under torchrun, received none; name a directory that all hosts "
            "share: its checkpoints are what ranks that were started anew go on from"
        )
    elif environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # There ranks that are started anew find the addresses of earlier ones and wait for those for ever, and a host
        # that becomes the first has a store of its own (https://github.com/pytorch/pytorch/issues/135712, torch 2.14).
        raise UserError(
            "expected a store of their own for ranks that torchrun starts anew with --elastic, received its agents', "
            "where they would wait for ranks that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, "
            "with --rdzv-backend c10d"
        )
    if config.schedule.global_batch_size is None:
        raise UserError(
            "expected --global-batch-size with --elastic, since the number of ranks changes and the run shall not, "
            "received none; give it"
        )


def with_newest_checkpoint(config: TrainConfig) -> TrainConfig:
    """The configuration of ranks that torchrun may have started anew: they resume what the output directory holds."""
    output = config.output
    if not config.parallel.elastic or config.strategy_name == "horovod" or output.resume:
        return config
    assert output.output_dir is not None  # `check` asks for one
    if not any((output.output_dir / "checkpoints").glob("step-*")):
        return config
    return dataclasses.replace(config, output=dataclasses.replace(output, resume="latest"))


def train(config: TrainConfig, build: Callable[[], Session | None]) -> None:
    """Train until all is done, with the ranks that are there at each moment.

    Args:
        build: forms the ranks anew and builds what they train; None for a process that has served others.
    """
    end_when_frozen(config.faults.fault_timeout)
    if config.strategy_name != "horovod":
        if session := build():
            session.train()
        return
    from allstep.common.checkpoint.saving import Commits

    commits, is_first = Commits(config.parallel.commit_every), False
    while True:
        try:
            session = build()
            assert session is not None  # ranks of Horovod all train
            session.commits, is_first = commits, session.place.rank == 0
            if session.train():
                return
        except Exception as error:
            if not _says_ranks_are_lost(error):
                raise
            CONNECTIONS.end()
            _save(commits, config.output, speaks=is_first)
        session = None


class _Hosts:
    """What horovodrun has for the ranks, as a listener of Horovod's notifications: hosts that change, and its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._have_changed = False
        self._ask_to_stop: Callable[[str], None] | None = None

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        """Horovod calls it on rank 0, in a thread of its own, whenever horovodrun sees hosts come or go."""
        with self._lock:
            self._have_changed = True
            self._ask()

    def on_stop(self, number: int) -> bool:
        """Horovod calls it on rank 0, in a thread of its own, where horovodrun received this signal.

        Returns: whether the ranks stop and save; while they are formed anew the newest commit is saved as it is.
        """
        with self._lock:
            if self._ask_to_stop:
                self._ask_to_stop(signal.Signals(number).name)
            return self._ask_to_stop is not None

    @contextlib.contextmanager
    def passing_on(self, ask_to_stop: Callable[[str], None]) -> Iterator[None]:
        """Have the ranks stop for a change of hosts while the block runs, or at once if there was one before."""
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
            # What comes from here on is a change against the hosts with which the job is formed next.
            self._have_changed = False
            self._ask_to_stop(HOSTS_CHANGED)


HOSTS = _Hosts()
CONNECTIONS = Connections()
"""Those of Horovod."""


def form_anew(horovod: ModuleType, notifications: Any, place: Placement) -> Placement:
    """Initialise Horovod with the ranks that are there now, and say which of them this one is.

    Args:
        horovod: `horovod.torch`, or the drop-in for Keras.
        notifications: Horovod's manager of notifications, which is to hear of changes of the hosts for `HOSTS`.

    Raises:
        RanksLost: others that were to be there are not; try again.
        SystemExit: this host is no longer part of the job, or is cut off from it.
    """
    horovod.shutdown()  # in order where nobody is lost: all ranks do it
    CONNECTIONS.end()
    _leave_if_cut_off(place)
    with stderr_held_back() as held:
        try:
            with CONNECTIONS.noted():
                horovod.init()
            _listen(notifications)
            return dataclasses.replace(
                place,
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
            raise RanksLost(f"the ranks could not be formed anew: {error}") from None


def _listen(notifications: Any) -> None:
    """Have `HOSTS` hear of changes of the hosts, from Horovod's manager of notifications."""
    is_new = notifications._service is None
    notifications.init()
    notifications.register_listener(HOSTS)
    if is_new:
        wait_without_polling(notifications._service)


def _leave_if_cut_off(place: Placement) -> None:
    """End this rank where it does not reach horovodrun, which forms the job without it.

    Else it would come back with the link, when another process has its place.
    """
    host, port = (os.environ[name] for name in GLOO_STORE)
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        leave(EXIT_FAULT, f"allstep: {who(place)} stopped: it does not reach horovodrun ({error})")


def _says_ranks_are_lost(error: Exception) -> bool:
    cause = error.__cause__ if type(error) is Fault else error
    return isinstance(cause, RanksLost) or (cause is not None and is_consequence(cause))


def _save(commits: Commits, output: OutputConfig, *, speaks: bool) -> None:
    """Write the newest commit before the job waits for ranks: horovodrun ends it if too few come.

    One of the ranks that are left does it and says so; the output directory is locked against the others. Where it was
    saved before, the one that `speaks` does.
    """
    from allstep.common.checkpoint import Checkpoints, OutputDirectory

    newest = commits.newest
    if newest is None or output.output_dir is None:
        return
    step = newest.progress.step
    with contextlib.suppress(UserError), OutputDirectory(output.output_dir, warn=lambda _: None) as directory:
        is_saved = (output.output_dir / "checkpoints" / f"step-{step:08d}").exists()
        if not is_saved:
            checkpoints = Checkpoints(directory, keep=output.keep_checkpoints)
            checkpoints.save(newest)
            checkpoints.close()
        if speaks or not is_saved:
            print_line(
                f"allstep: step {step} is saved while the ranks are formed anew; should too few come, --resume latest "
                "goes on from there",
                sys.stderr,
            )
