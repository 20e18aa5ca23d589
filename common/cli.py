"""The console script `allstep`: the commands beside the trainers, each a module that is imported when it is asked for.

allstep --help
allstep parity --optimizers momentum,adam
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.common.process.errors import UserError, shown
from allstep.common.process.exit import run_rank


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
        "allstep.common.launch.hosts",
        "Check the hosts of a job, convert them between launchers' notations, print the line that starts each.",
    ),
    "doctor": Command(
        "allstep.common.doctor.command",
        "Check hosts before a job: software, GPUs, memory, ssh, clocks, ports, bandwidth; say how to mend each fault.",
    ),
    "launch": Command(
        "allstep.common.launch.batch",
        "Write or submit a batch script for Slurm that saves at a notice, is queued again, and goes on.",
    ),
    "parity": Command(
        "allstep.benchmarks.proofs.parity",
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
        "Write report.html and report.md from results of the other commands, benchmarks and training runs.",
    ),
    "study": Command(
        "allstep.benchmarks.study",
        "Run a study of large batches, optimizers or strategies; say whether what the literature expects came out.",
    ),
    "prove": Command(
        "allstep.benchmarks.prove",
        "Say what is wrong with a distributed training script, whose it may be: weights, samples, gradients, rates.",
    ),
    "bisect": Command(
        "allstep.benchmarks.bisect",
        "Say where two runs with --trace part: the first step, tensor and rank; train that step again on both sides.",
    ),
    "tune": Command(
        "allstep.benchmarks.tune",
        "Search for the flags that train best, trial by trial under any launcher; goes on after a kill.",
    ),
    "difficulty": Command(
        "allstep.benchmarks.difficulty",
        "Train briefly and write the loss of each training sample, by which --curriculum orders them.",
    ),
    "soak": Command(
        "allstep.benchmarks.proofs.soak",
        "Kill training at random moments, resume it, and check that it ends as if undisturbed.",
    ),
}


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
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else "see allstep --help"
        raise UserError(f"expected one of the commands {', '.join(COMMANDS)}, received {shown(name)}; {advice}")
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


if __name__ == "__main__":
    main()
