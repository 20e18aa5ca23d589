"""Variables for ranks that are all on one host. Oracle: Open MPI's and Gloo's names; tests/cluster checks sockets."""

from __future__ import annotations

import dataclasses

import pytest

from allstep.common.launch.placement import ALONE
from allstep.common.launch.spawn import stay_on_host

ONE_HOST = dataclasses.replace(ALONE, launcher="mpirun", world_size=4, local_size=4)
TWO_HOSTS = dataclasses.replace(ONE_HOST, local_size=2)
REPORTED = {"GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo", "OMPI_MCA_btl": "self,vader"}


@pytest.mark.parametrize(
    ("placement", "before", "after"),
    [
        (ONE_HOST, {}, REPORTED),
        (ALONE, {}, REPORTED),
        (ONE_HOST, {"OMPI_MCA_btl": "^openib"}, REPORTED),  # as horovodrun starts ranks
        (TWO_HOSTS, {}, {}),
        (TWO_HOSTS, {"OMPI_MCA_btl": "^openib"}, {"OMPI_MCA_btl": "^openib"}),
    ],
)
def test_told(placement, before, after):
    stay_on_host(placement, before)
    assert before == after


def test_what_the_user_chose_stays():
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_IFACE": "eth0", "OMPI_MCA_btl": "tcp,self"}
    environ = dict(chosen)
    stay_on_host(ONE_HOST, environ)
    assert environ == chosen
