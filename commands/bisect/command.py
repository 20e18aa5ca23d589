"""Say where two runs part that should be equal: the first step, the first tensor and the first rank.

    python pytorch/train.py --trace --deterministic --output-dir runs/a
    allstep bisect runs/a runs/b

Both are output directories of runs with --trace. The step in which they part is trained again on both sides, from the
nearest checkpoint before it: a side that gives its own digests again computes as it is configured; one that does not
has a fault of hardware, a race, or sums in no fixed order. The exit status is 0 where the runs are equal, 1 where they
part, 2 where they cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.bisect.comparison import check_comparable, common_steps, first_difference, settings_apart
from allstep.commands.bisect.replay import NotReplayed, replay
from allstep.common.base.errors import printable
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.exact.trace import Trace, read
from allstep.common.process.exit import run_rank


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, replay and print; end with status 1 where the runs part."""
    parser = Parser("allstep bisect", __doc__)
    parser.add_argument("first", type=nonempty_path, metavar="RUN", help="the output directory of a run")
    parser.add_argument("second", type=nonempty_path, metavar="RUN", help="that of the other one")
    parser.add_argument("--no-replay", action="store_true", help="only compare what was recorded")
    flags = parser.parse_args(argv)
    first, second = read(flags.first), read(flags.second)
    check_comparable(first.first, second.first)
    steps, difference = common_steps(first, second), first_difference(first, second)
    if difference is None:
        print(f"equal for steps {steps[0]} to {steps[-1]}")
        return
    print(f"the runs part at {difference}")
    if difference.step == steps[0] and difference.step > 1:
        print("  it is the first step of which both have a record: they may have parted before")
    for name, one, other in settings_apart(first.first, second.first):
        print(printable(f"  {name}: {one}, {other}"))
    if not flags.no_replay:
        for path, trace in ((flags.first, first), (flags.second, second)):
            print(printable(f"{path}: {_verdict(path, trace, difference.step)}"), flush=True)
    sys.exit(1)


def _verdict(path: Path, recorded: Trace, step: int) -> str:
    """What a replay of a run says of it."""
    try:
        difference = first_difference(recorded, replay(path, recorded.first, step))
    except NotReplayed as error:
        return f"not replayed: {error}"
    if difference is None:
        return f"step {step} gives its own digests again: what makes it differ is its configuration, code or versions"
    fixed = recorded.first.config["deterministic"] or recorded.first.slices
    unless = "" if fixed else ", or sums in no fixed order: it had neither --slices nor --deterministic"
    return f"does not give its own digests again, first at {difference}: a fault of hardware or a race there{unless}"


if __name__ == "__main__":
    run_rank(main)
