"""Check a distributed training script: run a few of its steps on 1 and on N ranks, and compare them.

    allstep prove train.py -- --lr 0.1
    allstep prove -np 4 --launcher torchrun train.py

It can be any script that trains with PyTorch under Horovod or DistributedDataParallel, or with Keras under Horovod or a
mirrored strategy of tf.distribute. It runs unmodified, observed through hooks in its libraries. Its epochs are cut
after some steps, as if their loaders were shorter, and it is stopped after two of them if it does not end soon. Files
that the script writes are really written. The exit status is 0 if nothing is wrong, 1 if something is, 2 if the script
could not be checked.
"""

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.prove.checks import findings
from allstep.commands.prove.launching import ITSELF, MIRRORED, TF_CONFIG, Script
from allstep.commands.prove.report import as_json, report
from allstep.commands.prove.runs import Runs
from allstep.commands.shared.jobs import LAUNCHERS
from allstep.common.base.errors import UserError, print_line, quote
from allstep.common.base.flag_types import WEEK, Parser, local_ranks, nonempty_path, number, one_of, whole
from allstep.common.files.disk import read_regular
from allstep.common.process.exit import run_rank

_LARGEST_SCRIPT = 16 * 2**20
# The first pattern that occurs in a script determines how its ranks are started.
_SIGNS = (
    (r"\b(mp|multiprocessing)(\.| import .*\b)(spawn|start_processes)\b", ITSELF),
    (r"""(?s)\benviron\[["']MASTER_ADDR["']\] =.*\bProcess\(target=""", ITSELF),
    (r"\bMultiWorkerMirroredStrategy\b", TF_CONFIG),
    (r"\bMirroredStrategy\b", MIRRORED),
    (r"\bhorovod", "horovodrun"),
    (r"\btorch\b", "torchrun"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script, print what is wrong with it, and exit with status 1 if anything is."""
    parser = Parser("allstep prove", __doc__)
    add = parser.add_argument
    add("-np", dest="num_ranks", type=local_ranks(2), default=2, metavar="N", help="ranks to compare with one rank (2)")
    launchers = one_of(*LAUNCHERS, TF_CONFIG, MIRRORED, ITSELF)
    add("--launcher", type=launchers, help="what starts the ranks; by default inferred from the script")
    add(
        "--steps",
        type=whole(3, 10**6),
        default=10,
        metavar="K",
        help="observed in the second epoch, three times as many in the first (10)",
    )
    add("--timeout", type=number(1, WEEK), default=600, metavar="S", help="seconds for each of the two runs (600)")
    add("--json", action="store_true", help="print the report as one JSON object")
    add("script", type=nonempty_path, metavar="SCRIPT", help="a Python file, followed by its own arguments")
    argv = list(sys.argv[1:] if argv is None else argv)
    own, arguments = _split(argv)
    flags = parser.parse_args(own)
    launcher = flags.launcher or _launcher(flags.script, _read(flags.script))
    script = Script(flags.script, arguments, launcher, flags.steps, flags.timeout)
    alone = None if launcher == ITSELF else script.observe(1)
    runs = Runs(alone, script.observe(flags.num_ranks), script.path)
    found = findings(runs)
    if runs.together.failure and not found:
        raise script.refusal(runs.together, runs.together.failure)
    print_line(as_json(script, runs, found) if flags.json else report(script, runs, found))
    if found:
        sys.exit(1)


_WITH_VALUE = ("-np", "--launcher", "--steps", "--timeout")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into ours, up to the script, and the script's, with or without -- before them."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "--":
        index += 2 if argv[index] in _WITH_VALUE else 1
    rest = list(argv[index + 1 :])
    return list(argv[: index + 1]), rest[1:] if rest[:1] == ["--"] else rest


def _read(path: Path) -> str:
    """Return the text of the script. Raises UserError if the file cannot be read, or is not Python."""
    try:
        data = read_regular(path, maximum=_LARGEST_SCRIPT)
    except OSError as error:
        raise UserError(f"expected a Python script, received {quote(path)}: {error.strerror}; name a file") from None
    try:
        ast.parse(data)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"expected a Python script, received {quote(path)}, which is none: {error}") from None
    return data.decode(errors="replace")


def _launcher(path: Path, text: str) -> str:
    for pattern, launcher in _SIGNS:
        if re.search(pattern, text):
            return launcher
    raise UserError(
        f"expected a script with Horovod, torch or a mirrored strategy, received {quote(path)} without a word of "
        "them; say by --launcher how its ranks are started"
    )


if __name__ == "__main__":
    run_rank(main)
