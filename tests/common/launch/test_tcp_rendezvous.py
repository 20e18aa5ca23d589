"""Rendezvous at a TCP port of rank 0. Oracle: the messages of the ranks, and their errors."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from ranks import free_port

from allstep.common.base.errors import Fault, UserError
from allstep.common.launch.env_launcher import meet
from allstep.common.launch.placement import BY_HAND, Placement


@pytest.fixture
def address():
    return "127.0.0.1", free_port()


def placement(rank: int, world_size: int) -> Placement:
    return Placement(BY_HAND, rank, world_size, 0, 1, None, ("localhost",))


class Rank(threading.Thread):
    """A rank that exchanges messages with the others, for one topic after another."""

    def __init__(self, rank: int, world_size: int, address, topics=("hosts",), seconds: float = 30) -> None:
        super().__init__(daemon=True)
        self.placement, self.address, self.topics, self.seconds = placement(rank, world_size), address, topics, seconds
        self.answers: list[list[str]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for topic in self.topics:
                text = f"{topic} of {self.placement.rank}"
                self.answers.append(meet(text, self.placement, self.address, topic=topic, seconds=self.seconds))
        except (UserError, Fault) as error:
            self.error = error

    def joined(self) -> Rank:
        self.join(60)
        assert not self.is_alive()
        return self


def test_ranks_meet_as_often_as_they_have_topics(address):
    topics = [str(number) for number in range(20)]
    ranks = [Rank(rank, 4, address, topics).joined for rank in (3, 1, 0, 2)]
    for joined in ranks:
        assert joined().answers == [[f"{topic} of {rank}" for rank in range(4)] for topic in topics]


def test_who_says_another_number_of_ranks_is_refused(address):
    others = [Rank(0, 2, address)]
    assert "expected 2 ranks, as rank 0 does, received 4 from rank 1" in str(Rank(1, 4, address).joined().error)
    others.append(Rank(1, 2, address))
    assert [other.joined().error for other in others] == [None, None]


def test_a_rank_twice_is_refused(address):
    ranks = [Rank(rank, 3, address) for rank in (0, 1, 1)]
    while all(rank.is_alive() for rank in ranks):
        time.sleep(0.01)
    ranks.append(Rank(2, 3, address))
    refused, *others = sorted((rank.joined().error for rank in ranks), key=lambda error: error is None)
    assert "expected every rank once, received rank 1 of 3 twice" in str(refused)
    assert others == [None] * 3


def test_a_port_that_is_taken(address):
    with socket.create_server(address):
        error = Rank(0, 2, address).joined().error
    assert isinstance(error, UserError) and f"received {address[1]} (Address already in use)" in str(error)


def test_who_does_not_come_is_named(address):
    ranks = [Rank(rank, 3, address, seconds=1) for rank in (0, 2)]
    assert [type(rank.joined().error) for rank in ranks] == [Fault, Fault]
    assert "rank 1 did not come" in str(ranks[0].error)


@pytest.mark.parametrize("line", [b"", b"[]\n", b"[1, 2, 3]\n", b"7\n", b"\xff\n", b"[" * 9999 + b"\n"])
def test_somebody_else_listens_where_rank_0_should(line, address):
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            stream.readline()
            connection.sendall(line)

    with socket.create_server(address) as server:
        stranger = threading.Thread(target=answer, args=(server,), daemon=True)
        stranger.start()
        rank = Rank(1, 2, address)
        stranger.join(30)
    assert [Rank(0, 2, address).joined().answers, rank.joined().answers] == [[["hosts of 0", "hosts of 1"]]] * 2
