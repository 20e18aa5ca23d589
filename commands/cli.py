"""Console script `allstep` with all commands but the trainers; a command's module is imported only when it is called.

allstep --help
allstep parity --optimizers momentum,adam
"""

import importlib
import signal
import sys
from collections.abc import Sequence

from allstep.common.base.checkout import trainer_command
from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.base.version import VERSION
from allstep.common.process.exit import run_rank

COMMANDS = {
    "compare": "Compare frameworks and strategies on this machine: speed, scaling, time to accuracy, memory, start-up.",
    "hosts": "Check a job's hosts, convert them between launcher notations, and print each launcher's start command.",
    "doctor": "Check hosts before a job: software, GPUs, memory, ssh, clocks, ports, bandwidth; advise on each fault.",
    "horovod": "Build and install Horovod for the frameworks of this environment, or check the installed one.",
    "launch": "Write or submit a Slurm batch script that saves before its time limit, requeues itself, and resumes.",
    "parity": "Train the same network in both frameworks on 1, 2 and 4 ranks; print how far the results differ.",
    "forecast": "Forecast step time and efficiency, with a range, on 1 to 100,000 ranks; calibrate it on your runs.",
    "collectives": "Measure collectives in MPI, Horovod, torch and TensorFlow; recommend settings for Horovod.",
    "timeline": "Break down the time in a Horovod timeline: negotiation, queue, reduction, and overlap.",
    "report": "Write report.html and report.md from results of the other commands, benchmarks and training runs.",
    "study": "Run a study of large batches, optimizers or strategies; report whether it agrees with the literature.",
    "prove": "Check any distributed training script: are the ranks in sync, and if not, which line is wrong?",
    "bisect": "Find where two runs with --trace diverge: first step, tensor and rank; rerun that step on both sides.",
    "tune": "Search for the flags that train best, trial by trial, under any launcher; resume after a kill.",
    "evaluate": "Evaluate a trained network under any launcher: loss, metrics, and predictions of samples or pictures.",
    "export": "Export a trained network to PyTorch, ONNX, Keras or TensorFlow; check it there; write a model card.",
    "difficulty": "Train briefly and write the loss of each training sample, for --curriculum to order the samples.",
    "soak": "Kill training at random moments, resume it, and check that the result is as without a kill.",
}
"""Line of each command in `allstep --help`; `main` in commands/NAME/command.py takes the words after its name."""

ALIASES = {"predict": "forecast"}
"""Former names of commands, accepted for one release."""


def main() -> None:
    """Run the command that the command line names; SIGTERM and SIGHUP end it like Ctrl-C, after its jobs."""
    for notice in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(notice) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(notice, signal.default_int_handler)
    run_rank(lambda: call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> None:
    """Call the command that the first argument names with the others; without arguments, or for --help, list commands.

    Raises UserError if the command does not exist, or does not take these arguments.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    if arguments[0] == "--version":
        print(f"allstep {VERSION}")
        return
    name, *rest = arguments
    if name in ALIASES:
        print(f"allstep {name} is now allstep {ALIASES[name]}; the old name goes in the next release", file=sys.stderr)
        name = ALIASES[name]
    if name not in COMMANDS:
        advice = did_you_mean(name, COMMANDS, "see allstep --help")
        raise UserError(f"expected one of the commands {', '.join(COMMANDS)}, received {quote(name)}; {advice}")
    importlib.import_module(f"allstep.commands.{name}.command").main(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: allstep COMMAND [FLAGS]     (allstep COMMAND --help lists a command's flags; --version)\n\n"
        f"{commands}\n\n"
        f"To train: {trainer_command('pytorch')} or {trainer_command('tensorflow')}, with --help for their flags."
    )


if __name__ == "__main__":
    main()
