"""The launcher of cluster/mpijob.yaml in the bed, with the host file and the variables that the MPI operator gives it.

Oracle: the operator's controller, version 0.8, which writes them; the training run's own metrics.
"""

from __future__ import annotations

import yaml
from cluster import bed
from ranks import REPOSITORY, events, last

# newConfigMap and ompiEnvVars of the controller; server1 and server2 stand for the names of pods.
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
