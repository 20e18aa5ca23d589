"""`allstep doctor`: checks whether these hosts can train, and tells how to fix what prevents it.

    allstep doctor                                  this host; in an allocation or an MPIJob, its hosts
    allstep doctor -H server1:4,server2:4           these hosts, by ssh
    allstep doctor --hosts hostfiles/two-servers --json
    allstep doctor --skip all-reduce,frameworks     without the slowest checks

It checks compiler, Open MPI, Horovod against the installed frameworks, GPUs, memory, cores, limits and disks of each
host; ssh, agreement of software and data, clocks, networks and ports between hosts; and it measures a real all-reduce
on each host and across hosts. Each line that is not ok tells what to do. The last line is the command to start with.

It needs no root privileges, writes no files, and prints no environment variables. Exit status: 0 without faults, 1 with
faults, 2 for a mistake in the flags.
"""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from allstep.commands.doctor.finding import Finding
from allstep.commands.hosts.command import Host, check, given_hosts, launch_lines
from allstep.common.base.errors import printable
from allstep.common.base.flag_types import Parser, listed, nonempty_path, one_of
from allstep.common.base.progress_bar import ProgressBar

_FORMAT = {"format": "allstep-doctor", "version": 1}
_SKIPPABLE = ("frameworks", "data", "ports", "all-reduce")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the checks, print the findings, and exit with status 1 if there is a fault.

    Raises UserError if the flags or the hosts are wrong.
    """
    flags = _flags(argv)
    hosts = _hosts(flags)
    from allstep.commands.doctor.examination import examine  # imported late, since --help needs no NumPy and psutil

    with ProgressBar(2) as progress:
        findings = examine(hosts, progress=progress, skip=flags.skip, data_dir=flags.data_dir)
    launcher = "horovodrun, MPI" if importlib.util.find_spec("horovod") else f"torchrun on {hosts[0].name}"
    command = launch_lines(hosts)[launcher]
    print(to_json(findings, command) if flags.json else to_text(findings, command))
    if any(finding.level == "fault" for finding in findings):
        sys.exit(1)


def to_json(findings: Sequence[Finding], command: str) -> str:
    """Return the findings as JSON for other programs."""
    content = {**_FORMAT, "findings": [vars(finding) for finding in findings], "command": command}
    return json.dumps(content, indent=1)


def to_text(findings: Sequence[Finding], command: str) -> str:
    """Return the findings as text, grouped by host; output of other hosts is made safe for a terminal."""
    lines = []
    for host, group in groupby(sorted(findings, key=lambda one: (not one.host, one.host)), lambda one: one.host):
        lines.append(host or "all hosts")
        for one in group:
            advice = f"; {one.fix}" if one.fix else ""
            lines.append(printable(f"  {one.level:8} {one.subject:20} {one.found}{advice}"))
    counted = {level: sum(one.level == level for one in findings) for level in ("fault", "warning")}
    said = ", ".join(f"{number} {level}{'s' * (number > 1)}" for level, number in counted.items() if number)
    lines += ["", f"{said or 'all is well'}; {'fix the faults, then start' if counted['fault'] else 'to start'}:"]
    return "\n".join([*lines, f"  {command}"])


def _flags(argv: Sequence[str] | None) -> Namespace:
    parser = Parser("allstep doctor", __doc__)
    parser.add_argument("--hosts", type=nonempty_path, metavar="FILE", help="a hostfile")
    parser.add_argument("-H", dest="list", metavar="LIST", help="hosts as in server1:4,server2:4")
    parser.add_argument("--data-dir", type=nonempty_path, metavar="DIR", help="folder of the data sets")
    skip = f"leave out some of {', '.join(_SKIPPABLE)}"
    parser.add_argument("--skip", type=listed(one_of(*_SKIPPABLE)), default=(), metavar="NAME,...", help=skip)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _hosts(flags: Namespace) -> list[Host]:
    """Return the hosts of the flags, else of the allocation, else this host with a slot per GPU or at most two."""
    hosts = given_hosts(flags.hosts, flags.list, name="--hosts")
    if not hosts:
        num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        hosts = [Host("localhost", num_gpus or min(2, len(os.sched_getaffinity(0))))]
    check(hosts)
    return hosts
