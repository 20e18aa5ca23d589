"""The console script `allstep`: the commands beside the trainers, each a module that is imported when it is asked for.

allstep --help
allstep parity --optimizers momentum,adam
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from allstep.common.ending import run_rank
from allstep.common.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command of `allstep`."""

    module: str
    """Its `main` takes the arguments that follow the command."""
    summary: str
    """One line for `allstep --help`."""


COMMANDS = {
    "compare": Command(
        "allstep.benchmarks.compare",
        "Compare frameworks and strategies on this machine: speed, scaling, time to accuracy, memory, start-up.",
    ),
    "hosts": Command(
        "allstep.common.hosts",
        "Check the hosts of a job, convert them between launchers' notations, print the line that starts each.",
    ),
    "parity": Command(
        "allstep.benchmarks.parity",
        "Train alike in both frameworks and on 1, 2 and 4 ranks; print how far they differ.",
    ),
    "predict": Command(
        "allstep.benchmarks.predict",
        "Forecast step time, efficiency and time to accuracy on 1 to 100,000 ranks; check against published tables.",
    ),
    "collectives": Command(
        "allstep.benchmarks.collectives",
        "Measure all-reduce and its kin in MPI, Horovod, torch and TensorFlow; recommend Horovod's settings.",
    ),
    "timeline": Command(
        "allstep.benchmarks.timeline",
        "Say where the time of a Horovod timeline went: negotiation, queue, reduction, and overlap.",
    ),
    "report": Command(
        "allstep.benchmarks.report",
        "Write report.html and report.md from results of compare, collectives, predict, benchmarks and training runs.",
    ),
    "soak": Command(
        "allstep.benchmarks.soak",
        "Kill training at random moments, resume it, and check that it ends as if undisturbed.",
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the user's mistakes as the rest of allstep reports them."""

    def __init__(self, command: str, description: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"allstep {command}", description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists all flags)")


def listed(kind: Callable[[str], object], choices: Sequence[str] = ()) -> Callable[[str], tuple]:
    """A flag's type: one or more values with commas between them, of `choices` where those are given."""

    def parse(text: str) -> tuple:
        values = text.split(",")
        for value in values:
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, received {value!r}")
        return tuple(kind(value) for value in values)

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """A flag's type: a whole number from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, received {text!r}")
        return int(text)

    return parse


def main() -> None:
    """Run the command that the command line names."""
    run_rank(lambda: call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> None:
    """Call the command named first with the arguments after it; without any, and for --help, list the commands.

    Raises:
        UserError: there is no such command, or it has no such arguments.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UserError(f"expected one of the commands {', '.join(COMMANDS)}, received {name!r}; see allstep --help")
    importlib.import_module(COMMANDS[name].module).main(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: allstep COMMAND [FLAGS]     (allstep COMMAND --help lists a command's flags)",
            "",
            *lines,
            "",
            "To train: python pytorch/train.py or python tensorflow/train.py, with --help for their flags.",
        ]
    )
