"""Rank 0's view of all ranks: it hears their heartbeats, notices who is lost or stuck, and ends the job.

It also leads the agreement of the ranks to stop together (`ProgressState` says why that is right).
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.common.base.terminal import print_line
from allstep.common.process.exit import EXIT_FAULT, has_spoken, leave, speak
from allstep.common.process.parent_watchdog import end_cut_off_daemon
from allstep.common.watch import stall_detection
from allstep.common.watch.channel import Channel, line
from allstep.common.watch.listener import Entrance
from allstep.common.watch.progress_state import ProgressState
from allstep.common.watch.relay import BEAT_SECONDS
from allstep.common.watch.stall_detection import Seen, Stall

# Of the timeout for silence, the share after which a rank counts as lost: the launcher needs the rest to end the job.
_SILENCE_SHARE = 2 / 3
# A host's ranks are lost one after the other; one line names all of them. The launcher may be about to end rank 0.
_GATHER_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 5.0
_SOON_SECONDS = 0.02
_QUIET_SECONDS = 3 * BEAT_SECONDS


@dataclass(frozen=True)
class Limits:
    """When the watch ends a job."""

    stall: float
    """Seconds without progress of a rank for which the others wait; 0 for never."""
    silence: float
    """Seconds from the moment a host cannot be reached any more to the end of the job."""
    elastic: bool = False
    """Whether a lost rank does not end the job, which goes on without it."""
    launcher: float = 0.0
    """Seconds that the launcher needs to notice the same; it does not end the job where ranks leave before."""

    @property
    def lost(self) -> float:
        """Seconds of silence after which a rank is lost."""
        return self.silence * _SILENCE_SHARE

    @property
    def linger(self) -> float:
        """Seconds from then on for the launcher to end the job."""
        return max(self.silence, self.launcher) - self.lost if self.launcher else 0.0


class Monitor:
    """Runs in a thread of rank 0, and ends the process where the job cannot go on."""

    def __init__(self, world_size: int, own: Channel, progress_state: ProgressState, limits: Limits) -> None:
        """`own` is the connection to the agent that rank 0 has as well, `progress_state` is rank 0's."""
        self._world_size, self._progress_state, self._limits = world_size, progress_state, limits
        self._started = time.monotonic()
        self._channels: dict[int, Channel] = {}
        self._connected: set[int] = set()  # ranks, by a channel of their own or by that of a relay
        self._seen: dict[int, Seen] = {}
        self._farewells: dict[int, int] = {}  # exit statuses of the ranks that have reported why they leave
        self._finished: set[int] = set()
        self._lost: list[Seen] = []
        self._asked = False  # where the ranks are, since some seem to be stuck
        self._answers: dict[int, dict] = {}
        self._ask_at = 0.0  # not before are ranks asked where they are
        self._decide_at = 0.0
        self._begun: dict[int, int] = {}
        self._notice = ""
        self._is_broken = False  # in an elastic job: the ranks are about to be formed anew
        self._entrance: Entrance | None = None
        self._selector = selectors.DefaultSelector()
        self._admit(0, socket.gethostname(), own)

    def listen(self, listener: socket.socket, token: str) -> None:
        """Let the other ranks in: those that know `token`."""
        self._entrance = Entrance(listener, self._selector, token, self._let_in)

    def notify_all(self, **message: object) -> None:
        """Send a message to every rank."""
        text = line(message)
        for channel in list(self._channels.values()):
            channel.send_line(text)

    def send_farewell(self, status: int) -> None:
        """Notify every rank that rank 0 leaves and has reported why."""
        self.notify_all(bye=status)

    def run(self) -> None:
        """Watch until all ranks are through, and know that the others are."""
        next_beat = time.monotonic()
        while self._channels:
            concluding = self._lost or self._asked
            wait = _SOON_SECONDS if concluding else max(0.0, next_beat - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # one before it may have closed it
                    key.data()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self.notify_all(beat=True)
                self._look(now)
            self._conclude(now)

    # Who is there.

    def _let_in(self, channel: Channel, greeting: dict, others: list[dict]) -> bool:
        if greeting["rank"] in self._seen:
            return False
        self._admit(greeting["rank"], greeting["host"], channel)
        self._take(greeting["rank"], others)
        return True

    def _admit(self, rank: int, host: str, channel: Channel) -> None:
        self._channels[rank] = channel
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._receive(rank))
        self._join(rank, host, channel)

    def _join(self, rank: int, host: str, channel: Channel) -> None:
        """Watch a rank from now on, which speaks by `channel`: its own, or that of a relay."""
        now = time.monotonic()
        self._connected.add(rank)
        self._seen[rank] = Seen(rank, host, heard_at=now, moved_at=now)
        if self._notice:
            channel.send(freeze=True)
        if len(self._seen) == self._world_size:
            self.notify_all(all_here=True)
            self._let_nobody_in()

    # What they say.

    def _receive(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            messages = channel.receive()
        except EOFError:
            self._selector.unregister(channel)
            del self._channels[rank]
            channel.close()
            self._gone(rank)
            return
        self._take(rank, messages)

    def _take(self, rank: int, messages: list[dict]) -> None:
        """Hear what came by the channel of a rank: its own messages, or what it relays of others."""
        for message in messages:
            if "relayed" in message:
                for sender, relayed in message["relayed"]:
                    self._hear(sender, relayed)
            elif "joined" in message:
                self._join(message["joined"], message["host"], self._channels[rank])
            else:
                self._hear(rank, message)

    def _hear(self, rank: int, message: dict) -> None:
        if "moves" in message:
            self._seen[rank].hear(time.monotonic(), **message)
        elif "gone" in message:
            self._gone(rank)
        elif "bye" in message:
            self._farewells[rank] = message["bye"]
        elif "finished" in message:
            self._finished.add(rank)
            if self._is_over:
                self.notify_all(bye=0)
        elif "notice" in message and not self._notice:
            self._notice = message["notice"]
            self.notify_all(freeze=True)
        elif "begun" in message:
            self._begun[rank] = message["begun"]
            if len(self._begun) == self._world_size:
                # At least one tick, so that there is something to save.
                self.notify_all(last_tick=max(1, *self._begun.values()), notice=self._notice)
        elif "stack" in message and self._asked:
            self._answers[rank] = message

    def _gone(self, rank: int) -> None:
        """A connection has ended: in peace, or by a rank that has reported why, or without a word."""
        self._connected.discard(rank)
        if self._limits.elastic and rank == 0 and not self._is_over:
            self._close()
        elif self._limits.elastic and rank in self._farewells:
            self._break("")
        elif rank in self._farewells:
            leave(self._farewells[rank], "")
        elif not self._is_over:
            self._lose([self._seen[rank]], _GATHER_SECONDS)

    def _close(self) -> None:
        """End the watch of this rank and of all others, which are connected to nobody else."""
        self._let_nobody_in()
        for channel in self._channels.values():
            self._selector.unregister(channel)
            channel.close()
        self._channels.clear()

    def _let_nobody_in(self) -> None:
        """Close what no rank needs any more: the listener, and the connections of who has not shown the token."""
        for source in self._entrance.sources if self._entrance else ():
            self._selector.unregister(source)
            source.close()
        self._entrance = None

    @property
    def _is_over(self) -> bool:
        return len(self._finished) == self._world_size

    # What follows from it.

    def _look(self, now: float) -> None:
        """Look for ranks that are silent or stuck."""
        if self._lost or self._asked or self._farewells or self._is_broken:
            return
        there = [self._seen[rank] for rank in self._connected]
        if stall_detection.silent(there, now, self._limits.lost):
            # Those that went silent with it, too: their last heartbeats came within the same moments.
            self._lose(stall_detection.silent(there, now, self._limits.lost / 2), 0.0)
        elif len(self._seen) < self._world_size:
            if now - self._started > self._limits.silence:
                missing = [rank for rank in range(self._world_size) if rank not in self._seen]
                self._lose([Seen(rank, "an unknown host", now, now) for rank in missing], 0.0)
        elif self._stalled(now) and now >= self._ask_at:
            self._asked, self._decide_at = True, now + _ANSWER_SECONDS
            self.notify_all(ask="where")

    def _stalled(self, now: float) -> Stall | None:
        # Who is not heard of is not stuck, but may soon be lost.
        quiet = stall_detection.silent(self._seen.values(), now, _QUIET_SECONDS)
        if not self._limits.stall or self._finished or quiet:
            return None
        return stall_detection.stalled(list(self._seen.values()), now, self._limits.stall)

    def _lose(self, ranks: list[Seen], seconds: float) -> None:
        if not self._lost:
            self._decide_at = time.monotonic() + seconds
        self._lost += ranks

    def _conclude(self, now: float) -> None:
        """End the job where it has to be."""
        if self._lost and now >= self._decide_at:
            silent = [seen for seen in self._lost if seen.rank in self._connected]
            report = stall_detection.report_lost(
                self._lost, self._world_size, self._progress_state.step, self._limits.lost if silent else None
            )
            if self._limits.elastic:
                self._break(report)
                return
            if silent and has_spoken():  # and mpirun has not ended this rank since: it is here that the link is cut
                end_cut_off_daemon()
            if not silent or not self._limits.linger or has_spoken():
                leave(EXIT_FAULT, report)
            speak(report)
            self._decide_at = now + self._limits.linger
        if self._asked and (now >= self._decide_at or len(self._answers) == len(self._connected)):
            tensors, in_framework, stacks = (
                {rank: answer[name] for rank, answer in self._answers.items()}
                for name in ("tensors", "in_framework", "stack")
            )
            failed = any(answer["failed"] for answer in self._answers.values())  # and is about to say why
            stall = None if failed else self._stalled(now)  # somebody may have moved since
            if stall:
                stall = stall_detection.split_waiting_and_missing(stall, self._limits.stall, tensors, in_framework)
            if stall and self._limits.elastic:
                self._break(stall_detection.report_stall(stall, self._world_size, tensors, stacks), stall.missing)
            elif stall:
                leave(EXIT_FAULT, stall_detection.report_stall(stall, self._world_size, tensors, stacks))
            self._asked, self._answers, self._ask_at = False, {}, now + _ASK_AGAIN_SECONDS

    def _break(self, report: str, stuck: Sequence[Seen] = ()) -> None:
        """Have the ranks of an elastic job form anew, without those that are stuck, which leave."""
        if report:
            print_line(report, sys.stderr)
        self._is_broken, self._lost = True, []
        self.notify_all(leave=[seen.rank for seen in stuck])
