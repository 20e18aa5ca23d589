"""Watchdog thread of every rank: sends heartbeats to rank 0, and handles messages from rank 0 and signals.

The training loop may be stuck in a collective, or in C code that never returns. This thread is independent of it, so
that a rank can always exit when it has to.
"""

import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from allstep.common.base.compat import is_in_collective, is_in_framework
from allstep.common.base.errors import RanksLost
from allstep.common.data.loader import READ_AHEAD
from allstep.common.launch.placement import Placement
from allstep.common.launch.spawn import NOTICES
from allstep.common.process.exit import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    has_failed,
    has_spoken,
    leave,
    rank_name,
    seconds_to_turn,
    speak,
)
from allstep.common.process.parent_watchdog import end_cut_off_daemon
from allstep.common.watch import stall_detection
from allstep.common.watch.channel import BEAT_SECONDS, Channel, Clock
from allstep.common.watch.monitor import Limits
from allstep.common.watch.progress_state import ProgressState

_CAUGHT = (*NOTICES, signal.SIGINT)
# A notice may come from the scheduler and again from the launcher, which received it as well.
_SAME_NOTICE_SECONDS = 2.0
_MAX_CALLS = 12  # innermost calls of a stack
_FINISHED, _ABANDONED = b"\0", b"\xff"  # not the number of any signal
HOSTS_CHANGED = "a change of hosts"
"""Notice upon which the ranks of an elastic job stop in order to continue on other hosts."""


class Agent:
    """Watchdog of a rank, which runs in a thread and ends the process if the job cannot continue."""

    def __init__(
        self,
        placement: Placement,
        channel: Channel,
        progress_state: ProgressState,
        limits: Limits,
        tensors: Callable[[], Sequence[str]],
        *,
        first_host: str,
        sever: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to the monitor on `first_host` by `channel`; `watching` explains `tensors` and `sever`."""
        self._place, self._channel, self._first_host = placement, channel, first_host
        self._progress_state, self._limits, self._tensors, self._sever = progress_state, limits, tensors, sever
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._sources = selectors.DefaultSelector()
        self._sources.register(self._inbox, selectors.EVENT_READ)
        self._sources.register(channel, selectors.EVENT_READ)
        self._clock = Clock()
        self._heard_at = self._clock.now()
        self._connected = True
        self._all_here = threading.Event()
        self._farewell: int | None = None  # exit status that rank 0 has announced; 0 when all ranks have finished
        self._noticed_at: float | None = None
        self._cut_off = False
        self._has_finished = False
        self._is_broken = False  # in an elastic job: the ranks are about to be formed again
        self._last_words: tuple[float, int, str] | None = None  # time to exit, exit status and message

    def catch_signals(self) -> Callable[[], None]:
        """Pass signals to this thread at once, wherever the training loop is; must be called in the main thread.

        Returns: a function that restores the previous handlers when the run is over and the thread has ended.
        """
        # Python writes a signal's number to this descriptor at once. Handlers run later, and have nothing to do.
        before = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        caught = [number for number in _CAUGHT if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, lambda *_: None) for number in caught}

        def restore() -> None:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                # If the run was stopped by a notice, this rank's own signal may still be on its way.
                is_over = self._progress_state.notice not in ("", HOSTS_CHANGED)
                signal.signal(number, signal.SIG_IGN if is_over else handler)
            for one in (self._sources, self._inbox, self._outbox):
                one.close()

        return restore

    def wait_for_all(self) -> None:
        """Wait until rank 0 is connected to all ranks; from then on a failing rank can notify all others."""
        self._all_here.wait()  # if that never happens, the thread ends the process
        self.check_whole()

    def finish(self) -> None:
        """Let the thread end once all ranks have finished; until then it reports lost ranks."""
        self._outbox.send(_FINISHED)

    def check_whole(self) -> None:
        """Raise RanksLost if an elastic job has lost ranks, which the training loop may not notice by itself."""
        if self._is_broken:
            raise RanksLost("other ranks were lost")

    def abandon(self) -> None:
        """Let the thread end at once, since the ranks of an elastic job are formed again with new watchdogs."""
        self._outbox.send(_ABANDONED)

    def ask_to_stop(self, notice: str) -> None:
        """Make all ranks stop at the same point, as upon a signal; any thread may call it."""
        self._channel.send(notice=notice)

    def send_farewell(self, status: int) -> None:
        """Notify rank 0 that this rank exits and has reported the reason."""
        self._channel.send(bye=status)

    def run(self) -> None:
        """Watch until `finish` is called on all ranks."""
        next_beat = self._clock.now()
        while self._farewell != 0 and not (self._is_broken and self._has_finished):
            until = min(next_beat, self._last_words[0]) if self._last_words else next_beat
            ready = [key.fileobj for key, _ in self._sources.select(max(0.0, until - self._clock.now()))]
            if self._inbox in ready:
                for number in self._inbox.recv(64):
                    if number == _FINISHED[0]:
                        self._has_finished = True
                        self._channel.send(finished=True)
                    elif number == _ABANDONED[0]:
                        self._farewell = 0
                    else:
                        self._signalled(number)
            if self._channel in ready:
                self._receive()
            now = self._clock.now()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat(now)
            if self._last_words:
                self._leave(now)
        self._channel.close()

    def _beat(self, now: float) -> None:
        progress_state = self._progress_state
        phase = progress_state.phase
        self._channel.send(
            moves=progress_state.moves,
            step=progress_state.step,
            phase=phase,
            is_new=progress_state.is_new,
            longest=progress_state.longest.get(phase, 0.0),
            first=progress_state.first.get(phase, 0.0),
        )
        if self._connected and now - self._heard_at > self._limits.lost:
            self._disconnect()
            if self._limits.elastic:
                self._break()
            else:
                self._lose_first_rank(self._limits.lost)

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._disconnect()
            if self._limits.elastic:
                self._break()
            elif self._farewell is None:
                self._lose_first_rank(None)
            else:
                leave(self._farewell, "")
            return
        self._heard_at = self._clock.now()
        for message in messages:
            self._hear(message)

    def _break(self) -> None:
        self._is_broken = True
        self._sever()
        self._all_here.set()

    def _disconnect(self) -> None:
        self._connected = False
        self._sources.unregister(self._channel)

    def _hear(self, message: dict) -> None:
        if "bye" in message:
            self._farewell = message["bye"]
        elif "all_here" in message:
            self._all_here.set()
        elif "freeze" in message:
            self._channel.send(begun=self._progress_state.freeze())
        elif "last_tick" in message:
            self._progress_state.decide(message["last_tick"], message["notice"])
        elif "leave" in message:
            self._break()
            if self._place.rank in message["leave"]:
                leave(EXIT_FAULT, "")
        elif "ask" in message:
            self._channel.send(
                stack=stacks(),
                tensors=list(self._tensors()),
                in_framework=is_in_framework(),
                in_collective=is_in_collective(),
                failed=has_failed() or self._last_words is not None,
            )

    def _signalled(self, number: int) -> None:
        now = self._clock.now()
        if has_spoken():
            leave(EXIT_FAULT, "")
        elif number == signal.SIGINT:
            self._leave_in_turn(EXIT_INTERRUPTED, "interrupted")
        elif number in NOTICES and self._progress_state.phase == "start":
            # Nothing needs to be saved yet, and a rank that reads a checkpoint from a hanging host would never stop.
            self._leave_in_turn(128 + number, f"{signal.Signals(number).name} came before anything was trained")
        elif number in NOTICES:
            if self._noticed_at is None:
                self._noticed_at = now
                self._channel.send(notice=signal.Signals(number).name)
            elif now - self._noticed_at > _SAME_NOTICE_SECONDS:
                self._leave_in_turn(128 + number, f"{signal.Signals(number).name} came again before all was saved")

    def _leave_in_turn(self, status: int, reason: str) -> None:
        """Exit when it is this rank's turn to report; if another rank reports before, exit without a message."""
        message = f"allstep: {rank_name(self._place)} stopped at step {self._progress_state.step}: {reason}"
        self._leave_at(seconds_to_turn(self._place.rank), status, message)

    def _lose_first_rank(self, seconds_of_silence: float | None) -> None:
        """Report that rank 0 is lost, since it sent no farewell. On each host the first remaining rank reports it."""
        placement, reason = self._place, stall_detection.reason_lost(seconds_of_silence)
        stopped = f"rank 0 of {placement.world_size} on {self._first_host} stopped at step {self._progress_state.step}"
        speaks = placement.rank == 1 or placement.local_rank == 0
        message = f"allstep: {stopped}: {reason} (reported by {rank_name(placement)})" if speaks else ""
        self._leave_at(seconds_to_turn(placement.rank - 1), EXIT_FAULT, message)
        self._cut_off = seconds_of_silence is not None

    def _leave_at(self, seconds: float, status: int, message: str) -> None:
        if self._last_words is None:
            self._last_words = self._clock.now() + seconds, status, message

    def _leave(self, now: float) -> None:
        """Exit if it is time; if the launcher is about to notice the fault by itself, wait for that first."""
        assert self._last_words is not None
        at, status, message = self._last_words
        if now < at:
            return
        if self._cut_off and self._limits.linger and not has_spoken():
            speak(message)
            self._last_words = now + self._limits.linger, status, message
            return
        if self._cut_off and self._place.launcher == "mpirun":
            end_cut_off_daemon()
        leave(status, message)


def stacks() -> str:
    """Return the Python stacks of the main thread and of the threads that prefetch batches."""
    frames = sys._current_frames()
    # Threads that have started since then have no frame.
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident in frames}
    return "".join(
        f"  {name}:\n{''.join(traceback.format_stack(frames[ident], _MAX_CALLS))}"
        for ident, name in names.items()
        if name in ("MainThread", READ_AHEAD)
    )
