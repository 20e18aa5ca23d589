"""Rendezvous of ranks in a Slurm step. Oracle: the messages of the ranks."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

import pytest

from allstep.common.base.errors import UserError
from allstep.common.launch import rendezvous
from allstep.common.launch.placement import Placement

FIRST = Placement("srun", 0, 2, 0, 2, 0, ("localhost",))
STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'[0, "x"]\n',
    b'["addresses", 2, 0, "x"]\n',
    b'["addresses", 2, 2, "x"]\n',
    b'["addresses", 2, true, "x"]\n',
    b'["addresses", 2, "1", "x"]\n',
    b'["addresses", 2, 1, 7]\n',
    b'["addresses", "2", 1, "x"]\n',
    b'["hosts", 2, 1, "x"]\n',
    b'["addresses", 9, 1, "x"]\n',
    b"1" * 5000 + b"\n",
    b"[" * 9999 + b"\n",
    b"\xff\xfe\n",
    b"{}\n",
]


def test_strangers_do_not_disturb_ranks_that_meet():
    environ = {"SLURM_JOB_ID": str(os.getpid())}
    said: dict[int, list[str]] = {}

    def meet(rank: int) -> None:
        said[rank] = rendezvous.all_gather(f"I am {rank}", replace(FIRST, rank=rank, local_rank=rank), environ)

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
    with socket.create_connection(address):  # and a connection without any message
        ranks[1].start()
        for rank in ranks:
            rank.join(30)
    assert said == {0: ["I am 0", "I am 1"], 1: ["I am 0", "I am 1"]}


def test_rank_0_listens_for_other_hosts_where_there_are_some():
    placement = Placement("srun", 0, 2, 0, 1, 0, ("server1", "server2"))
    assert rendezvous.slurm_address(placement, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}) == ("", 20033)
    other = replace(placement, rank=1, cross_rank=1)
    assert rendezvous.slurm_address(other, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}) == ("server1", 20033)


@pytest.mark.parametrize("number", ["", "-1", "seven", "9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_job_without_a_number(number):
    with pytest.raises(UserError, match="expected SLURM_JOB_ID to be a whole number"):
        rendezvous.slurm_address(FIRST, {"SLURM_JOB_ID": number})
