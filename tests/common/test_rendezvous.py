"""How ranks of a Slurm step meet. Oracle: what each of them said."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

from allstep.common import rendezvous
from allstep.common.launcher import Placement

FIRST = Placement("srun", 0, 2, 0, 2, 0, 1, ("localhost",))
STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'[0, "x"]\n',
    b'[2, "x"]\n',
    b'["1", "x"]\n',
    b"[" * 9999 + b"\n",
    b"{}\n",
]


def test_strangers_do_not_disturb_ranks_that_meet():
    environ = {"SLURM_JOB_ID": str(os.getpid())}
    told: dict[int, list[str]] = {}

    def meet(rank: int) -> None:
        told[rank] = rendezvous.all_gather(f"I am {rank}", replace(FIRST, rank=rank, local_rank=rank), environ)

    ranks = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    ranks[0].start()
    address = rendezvous.slurm_address(FIRST, environ)
    assert address[0] == "127.0.0.1"  # all ranks are on one host
    for line in STRANGERS:
        connected = False
        while not connected and ranks[0].is_alive():
            with socket.socket() as stranger:
                if connected := stranger.connect_ex(address) == 0:
                    stranger.sendall(line)
        assert connected
    with socket.create_connection(address):  # and one that says nothing
        ranks[1].start()
        for rank in ranks:
            rank.join(30)
    assert told == {0: ["I am 0", "I am 1"], 1: ["I am 0", "I am 1"]}
