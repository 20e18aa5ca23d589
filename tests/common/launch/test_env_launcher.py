"""Ranks started without a launcher. Oracle: hand-computed placements from the ranks' messages."""

from __future__ import annotations

import pytest

from allstep.common.base.errors import UserError
from allstep.common.launch.env_launcher import Rank, located, master_address
from allstep.common.launch.placement import ALONE, BY_HAND, Placement, find_placement


def rank(host: str, *, address: str = "10.0.0.1", local_rank: str = "", local_size: str = "") -> Rank:
    return Rank(host, f"name of {host}", address, "server1", local_rank, local_size)


def placement(number: int, world_size: int) -> Placement:
    environ = {"RANK": str(number), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "server1", "MASTER_PORT": "29500"}
    return find_placement(environ)


def places(ranks: list[Rank]) -> list[tuple]:
    found = [located(placement(number, len(ranks)), ranks) for number in range(len(ranks))]
    return [(one.local_rank, one.local_size, one.cross_rank, one.hosts) for one in found]


def test_a_process_a_host():
    """Pods of a PyTorchJob: the master knows itself as localhost, the others know it as server1."""
    ranks = [rank("a", address=""), rank("b", address="10.0.0.2"), rank("c", address="10.0.0.3", local_rank="0")]
    hosts = ("server1", "10.0.0.2", "10.0.0.3")
    assert places(ranks) == [(0, 1, 0, hosts), (0, 1, 1, hosts), (0, 1, 2, hosts)]


def test_all_on_one_host():
    assert places([rank("a"), rank("a")]) == [(0, 2, 0, ("127.0.0.1",)), (1, 2, 0, ("127.0.0.1",))]


def test_hosts_in_turn():
    ranks = [rank(host, address=f"10.0.0.{host}") for host in "1212"]
    hosts = ("server1", "10.0.0.2")
    assert places(ranks) == [(0, 2, 0, hosts), (0, 2, 1, hosts), (1, 2, 0, hosts), (1, 2, 1, hosts)]


def test_local_ranks_that_were_given_stay():
    ranks = [rank("a", local_rank="1", local_size="2"), rank("a", local_rank="0"), rank("b", local_rank="0")]
    assert [found[0] for found in places(ranks)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("0", "0"), "expected LOCAL_RANK to count from 0 to 1 for rank 0, 1 on name of a, received 0, 0"),
        (("0", ""), "received 0, nothing"),
        (("1", "2"), "received 1, 2"),
    ],
)
def test_ranks_that_would_take_the_same_gpu(given, said):
    ranks = [rank("a", local_rank=given[0]), rank("a", local_rank=given[1]), rank("b", local_rank="0")]
    with pytest.raises(UserError, match=said):
        located(placement(0, 3), ranks)
    located(placement(2, 3), ranks)


def test_another_number_of_ranks_on_the_host():
    ranks = [rank("a", local_size="1"), rank("a")]
    with pytest.raises(UserError, match="expected LOCAL_WORLD_SIZE to be 2 for rank 0, 1 on name of a, received 1"):
        located(placement(0, 2), ranks)


@pytest.mark.parametrize(
    ("number", "environ", "expected"),
    [
        (0, {"MASTER_ADDR": "localhost"}, "localhost"),
        (0, {"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        (0, {"MASTER_ADDR": "server1"}, ""),
        # The master of a PyTorchJob gets MASTER_ADDR=localhost, and the others are in other pods.
        (0, {"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ""),
        (1, {"MASTER_ADDR": "job-master-0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "job-master-0"),
    ],
)
def test_where_rank_0_listens(number, environ, expected):
    """An empty host stands for all interfaces, and is used only if other hosts may have to connect."""
    assert master_address(placement(number, 2), {**environ, "MASTER_PORT": "29500"}) == (expected, 29500)


def test_ranks_on_one_host_meet_on_loopback():
    alone_on_host = Placement(BY_HAND, 1, 2, 1, 2, 0, ALONE.hosts)
    assert master_address(alone_on_host, {"MASTER_ADDR": "server1", "MASTER_PORT": "29500"}) == ("127.0.0.1", 29500)
