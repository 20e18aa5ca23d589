"""How long 8 ranks on two hosts take from the launch to their first step, beside the least that they could take:

    tests/cluster/two_hosts.sh 2 python -m allstep.benchmarks.startup [--unmodified PYTHON] [--output FILE]

It starts ranks on the hosts of -H, server1:4,server2:4 where not given. two_hosts.sh makes these two out of one machine
(root only); on a cluster, name yours and leave it out. For each framework:

    seconds to first step / bare    the trainer beside a bare horovodrun of the same imports
    bare / unmodified               that bare horovodrun beside the one of Horovod 0.28.1 as it was published but for
                                    what it needs to compile, in the environment that PYTHON belongs to
                                    (tools/unmodified_horovod.py makes one)
    launch / unmodified             the same for ranks that import nothing: horovodrun alone

Seconds are taken in turn, and the figures are medians over the rounds. The exit status is 0 where all targets are
reached, 1 where one is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.handwritten import bare
from allstep.commands.hosts.command import Host, parse_list, to_list
from allstep.commands.shared.measure import interleaved, median_ratio, print_table, save, seconds_until
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.commands.shared.records.runs import FILE
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, nonempty_path, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank

BOUND_OF_THE_TRAINER = "<= 1.2"
BOUND_OF_HOROVOD = "<= 0.6"


@dataclass(frozen=True)
class ClusterLaunch:
    """How ranks are started."""

    hosts: Sequence[Host]
    controller: str
    """mpi or gloo."""
    unmodified: Path | None
    """Python of an environment with an unmodified Horovod."""

    def command(self, *program: object, python: Path | None = None) -> list[str]:
        """The command that runs a program on all hosts, in this environment or in that of `python`."""
        num_ranks = sum(host.slots for host in self.hosts)
        start = ("horovodrun", f"--{self.controller}", "--disable-cache", "-np", num_ranks, "-H", to_list(self.hosts))
        return [*(environment_of(python) if python else ()), *map(str, (*start, *program))]


def environment_of(python: Path) -> list[str]:
    """The variables by which Open MPI from a wheel finds itself; `make setup` sets ours."""
    prefix = python.parent.parent
    path = f"PATH={prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return ["env", path, f"OPAL_PREFIX={prefix}", f"OMPI_MCA_orte_launch_agent={prefix}/bin/orted"]


def measurements(launch: ClusterLaunch, framework: str, directory: Path) -> dict[str, Callable[[], float]]:
    """By name, what takes the seconds of one launch."""

    def new_path() -> Path:
        return Path(tempfile.mkdtemp(dir=directory)) / "done"

    def trainer() -> float:
        output = new_path()
        metrics = output / FILE
        one_step = (
            "--dataset",
            "synthetic",
            "--synthetic-samples",
            sum(host.slots for host in launch.hosts),
            "--batch-size",
            1,
        )
        program = ("python", "-m", f"allstep.{framework}.train", *one_step, "--epochs", 1, "--log-every", 1)
        command = launch.command(*program, "--output-dir", output)
        return seconds_until(command, lambda: metrics.exists() and '"step"' in metrics.read_text())

    def until_done(*program: object, python: Path | None = None) -> float:
        done = new_path()
        return seconds_until(launch.command(*program, done, python=python), done.exists)

    imports, nothing, unmodified = ("python", bare.__file__, framework), ("touch",), launch.unmodified
    named = {"trainer": trainer, "bare": lambda: until_done(*imports)}
    if unmodified:
        named["unmodified bare"] = lambda: until_done(*imports, python=unmodified)
        named["launch"] = lambda: until_done(*nothing)
        named["unmodified launch"] = lambda: until_done(*nothing, python=unmodified)
    return named


def figures(framework: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """The rows of one framework."""

    def row(what: str, ours: str, reference: str, bound: str) -> Figure:
        own, others = seconds[ours], seconds[reference]
        ratio = median_ratio(own, others)
        return Figure(f"{framework}: {what}", statistics.median(own), statistics.median(others), ratio, bound)

    rows = [row("seconds to first step / bare", "trainer", "bare", BOUND_OF_THE_TRAINER)]
    if "launch" in seconds:
        rows += [
            row(f"{name} / unmodified", name, f"unmodified {name}", BOUND_OF_HOROVOD) for name in ("bare", "launch")
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.startup", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument(
        "-H", dest="hosts", type=parse_list, default="server1:4,server2:4", help="hosts and their ranks"
    )
    parser.add_argument("--controller", choices=("mpi", "gloo"), default="mpi", help="of horovodrun")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3, help="launches of each kind")
    parser.add_argument(
        "--unmodified", type=nonempty_path, metavar="PYTHON", help="of an environment with an unmodified Horovod"
    )
    parser.add_argument("--output", type=output_file, default="runs/startup.json", help="where raw samples are kept")
    flags = parser.parse_args(argv)
    launch = ClusterLaunch(flags.hosts, flags.controller, flags.unmodified)
    rows: list[Figure] = []
    samples = {}
    with tempfile.TemporaryDirectory(prefix="allstep-startup-") as directory:
        for framework in flags.frameworks:
            samples[framework] = interleaved(measurements(launch, framework, Path(directory)), flags.rounds)
            rows += figures(framework, samples[framework])
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run_rank(main)
