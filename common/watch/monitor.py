"""Monitor thread of rank 0: receives the heartbeats of all ranks, detects lost and stuck ranks, and ends the job.

It also coordinates the agreement of the ranks to stop together; `ProgressState` explains why that is correct.
"""

import selectors
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.common.base.errors import print_line
from allstep.common.base.resources import host_name
from allstep.common.process.exit import EXIT_FAULT, has_spoken, leave, speak
from allstep.common.process.parent_watchdog import end_cut_off_daemon
from allstep.common.watch import stall_detection
from allstep.common.watch.channel import BEAT_SECONDS, Channel, Clock, Entrance, line
from allstep.common.watch.progress_state import ProgressState
from allstep.common.watch.stall_detection import Seen, Stall

# A rank counts as lost after this share of the timeout for silence; the launcher needs the rest to end the job.
_SILENCE_SHARE = 2 / 3
# The ranks of a host are lost one after another, and are reported together. Short, since the launcher may end rank 0.
_GATHER_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 5.0
_SOON_SECONDS = 0.02
_QUIET_SECONDS = 3 * BEAT_SECONDS


@dataclass(frozen=True)
class Limits:
    """Timeouts of the watchdog."""

    stall: float
    """Seconds without progress after which a rank that others wait for counts as stuck; 0 for never."""
    silence: float
    """Seconds from the moment a host becomes unreachable to the end of the job."""
    elastic: bool = False
    """Whether the job continues without a lost rank."""
    launcher: float = 0.0
    """Seconds that the launcher needs to detect an unreachable host; it cannot end the job if ranks exit before."""

    @property
    def lost(self) -> float:
        """Seconds of silence after which a rank is lost."""
        return self.silence * _SILENCE_SHARE

    @property
    def linger(self) -> float:
        """Seconds after the loss of a rank that the launcher has to end the job."""
        return max(self.silence, self.launcher) - self.lost if self.launcher else 0.0


class Monitor:
    """Watchdog of all ranks, which runs in a thread of rank 0 and ends the process if the job cannot continue."""

    def __init__(self, world_size: int, own: Channel, progress_state: ProgressState, limits: Limits) -> None:
        """Watch `world_size` ranks; `own` is the connection to the agent of rank 0, `progress_state` is rank 0's."""
        self._world_size, self._progress_state, self._limits = world_size, progress_state, limits
        self._clock = Clock()
        self._started = self._clock.now()
        self._channels: dict[int, Channel] = {}
        self._connected: set[int] = set()  # ranks connected directly or through a relay
        self._seen: dict[int, Seen] = {}
        self._farewells: dict[int, int] = {}  # exit statuses of the ranks that have reported why they exit
        self._finished: set[int] = set()
        self._lost: list[Seen] = []
        self._asked = False  # whether ranks were asked for their stacks, since some seem to be stuck
        self._answers: dict[int, dict] = {}
        self._ask_at = 0.0  # earliest time to ask ranks for their stacks again
        self._decide_at = 0.0
        self._begun: dict[int, int] = {}
        self._notice = ""
        self._is_broken = False  # in an elastic job: the ranks are about to be formed again
        self._entrance: Entrance | None = None
        self._selector = selectors.DefaultSelector()
        self._admit(0, host_name(), own)

    def listen(self, listener: socket.socket, token: str) -> None:
        """Accept the connections of other ranks, which must know `token`."""
        self._entrance = Entrance(listener, self._selector, token, self._let_in)

    def notify_all(self, **message: object) -> None:
        """Send a message to every rank."""
        text = line(message)
        for channel in list(self._channels.values()):
            channel.send_line(text)

    def send_farewell(self, status: int) -> None:
        """Notify every rank that rank 0 exits and has reported the reason."""
        self.notify_all(bye=status)

    def run(self) -> None:
        """Watch until all ranks have finished, and were told that the others have finished, too."""
        next_beat = self._clock.now()
        while self._channels:
            concluding = self._lost or self._asked
            wait = _SOON_SECONDS if concluding else max(0.0, next_beat - self._clock.now())
            for key, _ in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # a callback before may have closed it
                    key.data()
            now = self._clock.now()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self.notify_all(beat=True)
                self._look(now)
            self._conclude(now)

    # Connections.

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
        """Watch a rank from now on; `channel` is its own, or that of a relay."""
        now = self._clock.now()
        self._connected.add(rank)
        self._seen[rank] = Seen(rank, host, heard_at=now, moved_at=now)
        if self._notice:
            channel.send(freeze=True)
        if len(self._seen) == self._world_size:
            self.notify_all(all_here=True)
            self._let_nobody_in()

    # Messages.

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
        """Handle messages from the channel of a rank: its own, or those that it relays for others."""
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
            self._seen[rank].hear(self._clock.now(), **message)
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
                # At least one tick, so that the checkpoint has progress to save.
                self.notify_all(last_tick=max(1, *self._begun.values()), notice=self._notice)
        elif "stack" in message and self._asked:
            self._answers[rank] = message

    def _gone(self, rank: int) -> None:
        """Handle a closed connection: of a finished rank, of a rank that has reported a fault, or of a lost rank."""
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
        """End the watch of all ranks, which are connected only to this monitor."""
        self._let_nobody_in()
        for channel in self._channels.values():
            self._selector.unregister(channel)
            channel.close()
        self._channels.clear()

    def _let_nobody_in(self) -> None:
        """Close the listener, and the connections that have not shown the token."""
        for source in self._entrance.sources if self._entrance else ():
            self._selector.unregister(source)
            source.close()
        self._entrance = None

    @property
    def _is_over(self) -> bool:
        return len(self._finished) == self._world_size

    # Decisions.

    def _look(self, now: float) -> None:
        """Look for ranks that are silent or stuck."""
        if self._lost or self._asked or self._farewells or self._is_broken:
            return
        there = [self._seen[rank] for rank in self._connected]
        if stall_detection.silent(there, now, self._limits.lost):
            # Include ranks that became silent at about the same time, e.g. those of the same host.
            self._lose(stall_detection.silent(there, now, self._limits.lost / 2), 0.0)
        elif len(self._seen) < self._world_size:
            if now - self._started > self._limits.silence:
                missing = [rank for rank in range(self._world_size) if rank not in self._seen]
                self._lose([Seen(rank, "an unknown host", now, now) for rank in missing], 0.0)
        elif self._stalled(now) and now >= self._ask_at:
            self._asked, self._decide_at = True, now + _ANSWER_SECONDS
            self.notify_all(ask="where")

    def _stalled(self, now: float) -> Stall | None:
        # A silent rank is not stuck, but may soon be lost.
        quiet = stall_detection.silent(self._seen.values(), now, _QUIET_SECONDS)
        if not self._limits.stall or self._is_over or quiet:
            return None
        if self._finished:
            ended = [self._seen[rank] for rank in self._finished]
            rest = [seen for rank, seen in self._seen.items() if rank not in self._finished]
            return stall_detection.left_behind(rest, ended, now, self._limits.stall)
        return stall_detection.stalled(list(self._seen.values()), now, self._limits.stall)

    def _lose(self, ranks: list[Seen], seconds: float) -> None:
        if not self._lost:
            self._decide_at = self._clock.now() + seconds
        self._lost += ranks

    def _conclude(self, now: float) -> None:
        """End the job if ranks are lost or stuck, after gathering further losses or the ranks' answers."""
        if self._lost and now >= self._decide_at:
            silent = [seen for seen in self._lost if seen.rank in self._connected]
            report = stall_detection.report_lost(
                self._lost, self._world_size, self._progress_state.step, self._limits.lost if silent else None
            )
            if self._limits.elastic:
                self._break(report)
                return
            if silent and has_spoken():  # mpirun has not ended this rank since, so this host is the one cut off
                end_cut_off_daemon()
            if not silent or not self._limits.linger or has_spoken():
                leave(EXIT_FAULT, report)
            speak(report)
            self._decide_at = now + self._limits.linger
        if self._asked and (now >= self._decide_at or len(self._answers) == len(self._connected)):
            tensors, in_framework, in_collective, stacks = (
                {rank: answer[name] for rank, answer in self._answers.items()}
                for name in ("tensors", "in_framework", "in_collective", "stack")
            )
            failed = any(answer["failed"] for answer in self._answers.values())  # this rank will report the reason
            stall = None if failed else self._stalled(now)  # ranks may have made progress since
            if stall and stall.have_ended:
                stall = stall_detection.confirm_left_behind(stall, self._limits.stall, tensors, in_collective)
            elif stall:
                stall = stall_detection.split_waiting_and_missing(stall, self._limits.stall, tensors, in_framework)
            if stall and self._limits.elastic:
                self._break(stall_detection.report_stall(stall, self._world_size, tensors, stacks), stall.missing)
            elif stall:
                leave(EXIT_FAULT, stall_detection.report_stall(stall, self._world_size, tensors, stacks))
            self._asked, self._answers, self._ask_at = False, {}, now + _ASK_AGAIN_SECONDS

    def _break(self, report: str, stuck: Sequence[Seen] = ()) -> None:
        """Make the ranks of an elastic job form again without those that are stuck, which exit."""
        if report:
            print_line(report, sys.stderr)
        self._is_broken, self._lost = True, []
        self.notify_all(leave=[seen.rank for seen in stuck])
