"""Measure how long 8 ranks on two hosts take from launch to first step, against the least that they could take:

    tests/cluster/two_hosts.sh 2 python -m allstep.benchmarks.startup [--unmodified PYTHON] [--output FILE]

Ranks are started on the hosts of -H, by default server1:4,server2:4. two_hosts.sh simulates these two on one machine
(root only); on a cluster, name your hosts and leave the script out. For each framework:

    seconds to first step / bare    the trainer against a bare horovodrun with the same imports
    bare / unmodified               that bare horovodrun against that of Horovod 0.28.1 as it was published, except for
                                    what it needs to compile, in the environment that PYTHON belongs to
                                    (tools/unmodified_horovod.py creates one)
    launch / unmodified             the same for ranks that import nothing: only horovodrun itself

All are measured in turn, and the figures are medians over the rounds. The exit status is 0 if all targets are reached,
1 otherwise.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.handwritten import bare
from allstep.benchmarks.runner import benchmark
from allstep.commands.hosts.command import Host, parse_list, to_list
from allstep.commands.shared.measure import compared, interleaved, new_output, seconds_until
from allstep.commands.shared.records.measured import Figure
from allstep.commands.shared.records.runs import FILE
from allstep.common.base.flag_types import nonempty_path
from allstep.common.process.exit import run_rank

BOUND_OF_THE_TRAINER = "<= 1.2"
BOUND_OF_HOROVOD = "<= 0.6"


@dataclass(frozen=True)
class ClusterLaunch:
    """Hosts and launcher of ranks."""

    hosts: Sequence[Host]
    controller: str
    """Controller of horovodrun: mpi or gloo."""
    unmodified: Path | None
    """Python of an environment with an unmodified Horovod, if there is one."""

    def command(self, *program: object, python: Path | None = None) -> list[str]:
        """Return the command that runs a program on all hosts, in this environment or in that of `python`."""
        num_ranks = sum(host.slots for host in self.hosts)
        start = ("horovodrun", f"--{self.controller}", "--disable-cache", "-np", num_ranks, "-H", to_list(self.hosts))
        return [*(environment_of(python) if python else ()), *map(str, (*start, *program))]


def environment_of(python: Path) -> list[str]:
    """Return the `env` command that lets Open MPI from a wheel find its files; `make setup` sets our variables."""
    prefix = python.parent.parent
    path = f"PATH={prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return ["env", path, f"OPAL_PREFIX={prefix}", f"OMPI_MCA_orte_launch_agent={prefix}/bin/orted"]


def measurements(launch: ClusterLaunch, framework: str, directory: Path) -> dict[str, Callable[[], float]]:
    """Return functions that measure the seconds of one launch, by name."""

    def trainer() -> float:
        output = new_output(directory)
        metrics = output / FILE
        num_ranks = sum(host.slots for host in launch.hosts)
        one_step = ("--dataset", "synthetic", "--synthetic-samples", num_ranks, "--batch-size", 1)
        program = ("python", "-m", f"allstep.{framework}.train", *one_step, "--epochs", 1, "--log-every", 1)
        command = launch.command(*program, "--output-dir", output)
        return seconds_until(command, lambda: metrics.exists() and '"step"' in metrics.read_text())

    def until_done(*program: object, python: Path | None = None) -> float:
        done = new_output(directory)
        return seconds_until(launch.command(*program, done, python=python), done.exists)

    imports, nothing, unmodified = ("python", bare.__file__, framework), ("touch",), launch.unmodified
    named = {"trainer": trainer, "bare": lambda: until_done(*imports)}
    if unmodified:
        named["unmodified bare"] = lambda: until_done(*imports, python=unmodified)
        named["launch"] = lambda: until_done(*nothing)
        named["unmodified launch"] = lambda: until_done(*nothing, python=unmodified)
    return named


def figures(framework: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """Return the rows of one framework."""
    pairs = {"seconds to first step / bare": ("trainer", "bare", BOUND_OF_THE_TRAINER)}
    if "launch" in seconds:
        for name in ("bare", "launch"):
            pairs[f"{name} / unmodified"] = (name, f"unmodified {name}", BOUND_OF_HOROVOD)
    return [
        compared(f"{framework}: {what}", seconds[ours], seconds[reference], target=bound)
        for what, (ours, reference, bound) in pairs.items()
    ]


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows of one framework, and the seconds of each round."""
    launch = ClusterLaunch(flags.hosts, flags.controller, flags.unmodified)
    seconds = interleaved(measurements(launch, framework, folder), flags.rounds)
    return figures(framework, seconds), seconds


FLAGS = {
    "-H": {"dest": "hosts", "type": parse_list, "default": "server1:4,server2:4", "help": "hosts and their ranks"},
    "--controller": {"choices": ("mpi", "gloo"), "default": "mpi", "help": "horovodrun's controller"},
    "--unmodified": {"type": nonempty_path, "metavar": "PYTHON", "help": "Python with an unmodified Horovod"},
}
main = benchmark("startup", __doc__, measure, rounds=3, flags=FLAGS)

if __name__ == "__main__":
    run_rank(main)
