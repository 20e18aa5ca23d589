"""Launchers of cluster/mpijob.yaml and mpijob-elastic.yaml on simulated hosts, with the MPI operator's files.

Oracle: the operator's controller, version 0.8, which writes host file, variables and discover_hosts.sh; the training
run's metrics.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cluster import bed
from ranks import REPOSITORY, events, last

from allstep.commands.soak.elastic_job import Follower

pytestmark = pytest.mark.cold

# Output of the controller's newConfigMap and ompiEnvVars; server1 and server2 stand for the names of pods.
HOSTFILE = "server1 slots=1\nserver2 slots=1\n"
VARIABLES = {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}


def test_launcher_of_an_mpijob(tmp_path):
    job = yaml.safe_load((REPOSITORY / "cluster/mpijob.yaml").read_text())
    [launcher] = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    [script] = launcher["args"]
    assert "-np 8 " in script and "--checkpoint-every 100" in script
    short = (
        script.replace("-np 8 ", "-np 2 ")
        .replace("--checkpoint-every 100", "--epochs 1")
        .replace("/runs", f"{tmp_path}")
    )
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(HOSTFILE)
    variables = {**VARIABLES, "OMPI_MCA_orte_default_hostfile": str(hostfile)}
    result = bed.run(*launcher["command"], short, **variables)
    assert result.returncode == 0, result.output
    start = last(events(tmp_path / "digits"), "start")
    assert (start["strategy"], start["world_size"]) == ("horovod", 2)
    assert bed.run(*launcher["command"], short.replace("--epochs 1", "--epochs 2"), **variables).returncode == 0
    assert [event["epoch"] for event in events(tmp_path / "digits") if event["event"] == "epoch"] == [1, 2]


@pytest.mark.full
def test_launcher_of_an_elastic_mpijob_that_is_scaled(tmp_path):
    """The job is scaled to one worker, and to two again."""
    job = yaml.safe_load((REPOSITORY / "cluster/mpijob-elastic.yaml").read_text())
    [launcher] = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    [script] = launcher["args"]
    ranks = "-np 8 --min-np 4 --max-np 16 --slots-per-host 4"
    assert ranks in script and "--checkpoint-every 100" in script
    short = (
        script.replace(ranks, "-np 2 --min-np 1 --max-np 2 --slots-per-host 1")
        .replace("--checkpoint-every 100", "--epochs 100000 --log-every 1 --slices 2")
        .replace("/etc/mpi", f"{tmp_path}")
        .replace("/runs", f"{tmp_path}")
    )
    discovery, output = tmp_path / "discover_hosts.sh", tmp_path / "digits"
    _list(discovery, "server1", "server2")

    follower = Follower(output / "metrics.jsonl")

    def formed(num_starts: int, num_ranks: int) -> bool:
        """Return whether `num_ranks` ranks have trained since the n-th start."""
        stand = follower.stand()
        return (stand.num_starts, stand.num_ranks) == (num_starts, num_ranks) and stand.steps_since > 0

    with bed.running(*launcher["command"], short, output=tmp_path / "log") as running:
        running.wait_until(lambda: formed(1, 2))
        _list(discovery, "server1")
        running.wait_until(lambda: formed(2, 1))
        _list(discovery, "server1", "server2")
        running.wait_until(lambda: formed(3, 2))
    follower.close()
    steps = [one["step"] for one in events(output) if one["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def _list(discovery: Path, *hosts: str) -> None:
    """Write discover_hosts.sh as the controller's updateDiscoverHostsInConfigMap does for these running workers."""
    new = discovery.with_suffix(".new")
    new.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts))
    new.chmod(0o555)
    new.rename(discovery)
