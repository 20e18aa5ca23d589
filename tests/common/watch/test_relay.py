"""Ranks watched through relays, as in large jobs: four ranks that are configured as if on two hosts.

Oracles: the reports, and which ranks have a relay's thread.
"""

from __future__ import annotations

import re
import socket
import threading

import pytest
from ranks import launch

from allstep.common.watch import Relay
from allstep.common.watch.channel import Channel

SCRIPT = """
import dataclasses, os, signal, socket, threading
from unittest import mock
from allstep.common import watch
from allstep.common.training.hooks import Hook
from allstep.common.process.exit import run_rank
from allstep.common.training.start import start
from allstep.pytorch import train

class Breaks(Hook):
    def on_step(self, session):
        if session.progress.step == 7:
            targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
            threads = [one for one in targets if isinstance(getattr(one, "__self__", None), watch.Relay)]
            print(f"rank {session.placement.rank} has {len(threads)} relays", flush=True)
            session.worker.collectives.barrier()
            if session.placement.rank == 3:
                os.kill(os.getpid(), signal.NUMBER)

def main():
    config, placement = start(train.strategies)
    mock.patch.object(watch, "RELAYED_FROM", 2).start()
    mock.patch.object(socket, "gethostname", lambda: f"host{placement.rank // 2}").start()
    placement = dataclasses.replace(placement, local_rank=placement.rank % 2, local_size=2)
    train.session(config, placement, [Breaks()]).train()

run_rank(main)
"""


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        ("SIGKILL", "1", "rank 3 of 4 on host1 stopped at step [78]: gone without a word"),
        ("SIGUSR1", "0", "rank 0 of 4 on host0 stopped after step [0-9]+ by SIGUSR1; resumable"),
    ],
)
def test_a_rank_behind_a_relay_is_heard(number, status, said, tmp_path):
    script = tmp_path / "relayed.py"
    script.write_text(SCRIPT.replace("NUMBER", number))
    result = launch("horovodrun-gloo", 4, script, "--output-dir", tmp_path / "run", "--model", "mlp", "--epochs", 3)
    assert str(int(result.returncode != 0)) == status, result.output
    assert len(re.findall(said, result.stderr)) == 1, result.output
    assert sorted(re.findall(r"rank . has . relays", result.stdout)) == [
        f"rank {rank} has {int(rank == 2)} relays" for rank in range(4)
    ]


def test_a_relay_ends_with_its_rank_though_another_closes_at_the_same_time():
    """Both ends are closed before the relay looks, so that it sees both at once. Oracle: its thread ends."""
    own, other, upstream = (socket.socketpair() for _ in range(3))
    relay = Relay(2, Channel(own[0]), Channel(upstream[0]), socket.create_server(("127.0.0.1", 0)), "token")
    relay._admit(3, Channel(other[0]))
    for one in (own, other):
        one[1].close()
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
