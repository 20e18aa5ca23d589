"""`allstep launch`: Slurm batch scripts that train, save a checkpoint before they are stopped, and resume later.

    allstep launch --slurm --nodes 2 --ranks-per-node 4 --gpus --time 4:00:00 -- pytorch/train.py --output-dir runs/a
    allstep launch --slurm --nodes 2 --submit -- tensorflow/train.py --output-dir runs/b --checkpoint-every 100
    allstep launch --slurm --each seed=0,1,2 -- pytorch/train.py --output-dir runs/seeds
    allstep launch --slurm --cpus-per-rank 16 --each models=cnn,resnet18 -- allstep compare --output-dir runs/compare

It prints the script; --submit passes it to sbatch. Two minutes before the time limit, and before a pre-emption that
Slurm announces (SlurmctldParameters=preempt_send_user_signal, and a grace time), the ranks save a checkpoint and end;
the job is requeued, and resumes by --resume auto. A command of allstep runs once, on one host, and starts its ranks
itself. --each makes a job array with a task for each value of that flag, and a folder for each in --output-dir.
"""

import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.launch.sbatch_script import BatchJob, Each, to_script
from allstep.common.base.errors import Fault, UserError, quote
from allstep.common.base.flag_types import Kind, Parser, flag_name, flag_value, one_of, whole, wrong
from allstep.common.cli.command_line import read_files
from allstep.common.launch.variables import MAX_PER_HOST, MAX_RANKS
from allstep.common.process.requirements import need

_TRAINERS = ("pytorch/train.py", "tensorflow/train.py")
_MODULES = {f"allstep.{name.removesuffix('.py').replace('/', '.')}": name for name in _TRAINERS}
# None of these characters has a meaning in a shell, or for Slurm in a line of options.
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.,:+-]{0,200}"
_EACH = rf"([a-z][a-z0-9-]*)=({_NAME})"
_TIME = r"([0-9]{1,4}-)?[0-9]{1,5}(:[0-9]{1,2}){0,2}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the script, or submit it.

    Raises UserError if the flags, or the command after --, are wrong; Fault if sbatch rejected the script.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    flags = _flags(words[:cut])
    job = _job(flags, words[cut + 1 :])
    written_by = shlex.join(word if word.isprintable() else ascii(word) for word in ("allstep", "launch", *words))
    script = to_script(job, written_by=written_by, repository=Path.cwd(), environment=Path(sys.prefix))
    if not flags.submit:
        print(script, end="")
        return
    if shutil.which("sbatch") is None:
        raise UserError("expected sbatch on the PATH for --submit, received none; submit on a host of the cluster")
    submitted = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    if submitted.returncode:
        raise Fault(f"sbatch did not take the script: {' '.join(submitted.stderr.split())}")
    print(submitted.stdout.strip())


def _flags(words: Sequence[str]) -> Namespace:
    parser = Parser("allstep launch", __doc__)
    add = parser.add_argument
    add("--slurm", action="store_true", required=True, help="write for Slurm, the only supported scheduler")
    add("--nodes", type=whole(1, MAX_RANKS), default=1, metavar="N")
    add("--ranks-per-node", type=whole(1, MAX_PER_HOST), default=1, metavar="N")
    add("--cpus-per-rank", type=whole(1, MAX_PER_HOST), default=1, metavar="N")
    add("--gpus", action="store_true", help="request a GPU for each rank")
    add("--launcher", type=one_of("mpirun", "srun"), default="mpirun", metavar="NAME", help="mpirun or srun")
    add("--time", type=_matching(_TIME, "a time of Slurm's", "4:00:00"), metavar="TIME", help="limit, as in 4:00:00")
    add("--partition", type=_matching(_NAME, "names", "gpu"), metavar="NAME")
    add("--account", type=_matching(_NAME, "a name", "physics"), metavar="NAME")
    add("--job-name", type=_matching(_NAME, "a name", "allstep"), default="allstep", metavar="NAME")
    add("--each", type=_each, metavar="FLAG=V,...", help="make a job array with a task for each value of a flag")
    add("--submit", action="store_true", help="submit the script with sbatch")
    return parser.parse_args(words)


def _matching(pattern: str, form: str, example: str) -> Kind[str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise wrong(f"to be {form}", text, f"write it as in {example}")
        return text

    return parse


def _each(text: str) -> Each:
    match = re.fullmatch(_EACH, text)
    values = tuple(dict.fromkeys(match[2].split(","))) if match else ()
    if not match or not all(re.fullmatch(_NAME, value) for value in values):
        raise wrong("to be a flag and its values", text, "write it as in seed=0,1,2")
    return Each(match[1], values)


def _job(flags: Namespace, command: Sequence[str]) -> BatchJob:
    """Return the job that the flags and the command describe.

    Raises UserError if the command is not a trainer or of allstep, or has flags that the script sets itself.
    """
    known = f"{' or '.join(_TRAINERS)} with its flags, or a command of allstep"
    if not command:
        raise UserError(f"expected {known} after --, received nothing; write -- and the command")
    command = list(command)
    if command[0] == "python":
        command = command[1:] or [""]
    if command[0] == "-m" and len(command) > 1 and command[1] in _MODULES:
        command = [_MODULES[command[1]], *command[2:]]
    trains = command[0].endswith(_TRAINERS)
    if not trains and command[0] != "allstep":
        raise UserError(f"expected {known} after --, received {quote(command[0])}; give one of these")
    command = [*_program(command[0]), *command[1:]] if trains else command
    names = [flag_name(word) for word in command]
    if "resume" in names:
        raise UserError(
            "expected a command without --resume, received one with it; the script gives --resume auto, leave it out"
        )
    if flags.each and flags.each.flag in names:
        raise UserError(f"expected --{flags.each.flag} in --each or in the command, received both; give one of them")
    rest, output_dir = _without(command, "output-dir")
    if not output_dir:
        raise UserError("expected --output-dir in the command, received none; name the folder from which it goes on")
    by_mpi = trains and _runs_horovod(rest)
    if by_mpi:
        need(["horovod"], by="--strategy horovod")
    given = {"job-name": flags.job_name, "time": flags.time, "partition": flags.partition, "account": flags.account}
    return BatchJob(
        command=tuple(rest),
        output_dir=output_dir,
        trains=trains,
        nodes=flags.nodes,
        ranks_per_node=flags.ranks_per_node,
        cpus_per_rank=flags.cpus_per_rank,
        gpus=flags.gpus,
        launcher=flags.launcher,
        by_mpi=by_mpi,
        options={name: value for name, value in given.items() if value},
        each=flags.each,
    )


def _program(trainer: str) -> Sequence[str]:
    """Return what Python runs: the trainer's file, or outside a checkout the installed module.

    Raises UserError if that file does not exist.
    """
    if Path(trainer).is_file():
        return (trainer,)
    if trainer not in _TRAINERS:
        raise UserError(f"no such file: {quote(trainer)}; give the path of a trainer as seen from {Path.cwd()}")
    return "-m", f"allstep.{trainer.removesuffix('.py').replace('/', '.')}"


def _runs_horovod(words: Sequence[str]) -> bool:
    """Return whether a trainer with these flags uses Horovod; files of its --config count if they can be read here."""
    parser = Parser("allstep launch", None, add_help=False)
    parser.add_argument("--strategy")
    parser.add_argument("--config", action="append", type=Path, default=[])
    given, _ = parser.parse_known_args(words)
    in_files = read_files(path for path in given.config if path.is_file())
    in_file = in_files["strategy"].words if "strategy" in in_files else ["horovod"]
    return (given.strategy or " ".join(in_file)) == "horovod"


def _without(words: list[str], name: str) -> tuple[list[str], str | None]:
    """Return the words without a flag, and its value, or None if the flag is missing."""
    for start, word in enumerate(words):
        if flag_name(word) == name:
            end = start + (1 if "=" in word else 2)
            return words[:start] + words[end:], flag_value(words[start:end], name)
    return words, None
