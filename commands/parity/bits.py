"""Check that runs with --slices end with the same bits under every strategy, launcher and number of ranks.

This is `allstep parity --bits`. Each run trains briefly on digits and gives three digests, which must be the same for
all runs of a framework: of the weights, of all numbers in metrics.jsonl except times, and of the checkpoints' arrays,
which include the optimizer's slots and batch norm's running statistics.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.shared.jobs import LAUNCHERS, scratch_folder, start
from allstep.commands.shared.measure import run
from allstep.commands.shared.page.document import Table, print_table
from allstep.commands.shared.records.runs import FILE
from allstep.common.catalog.strategies import STRATEGIES

_LAUNCHERS: dict[str, tuple[str | None, ...]] = {
    "horovod": ("horovodrun-mpi", "horovodrun-gloo", "mpirun"),
    "ddp": ("torchrun", "mpirun", None),
    "fsdp": ("torchrun", None),
    "multi-worker-mirrored": ("horovodrun-gloo", "mpirun"),
}
"""Launchers of the strategies that have any; None means that a flag of the trainer starts the ranks."""
_FLAGS = (
    *("--dataset", "digits", "--model", "cnn", "--global-batch-size", 59, "--epochs", 1, "--log-every", 1),
    *("--base-lr", 0.05, "--checkpoint-every", 10),
)
_BUCKET_SIZE = 0.05
"""Megabytes; small enough that PyTorch sends the network's gradients in three buckets."""
_TIMES = ("time", "epoch_seconds", "cumulative_seconds", "images_per_second", "peak_memory_bytes")


@dataclass(frozen=True)
class Configuration:
    """Framework, strategy, launcher and number of ranks of a run."""

    framework: str
    strategy: str
    launcher: str | None
    num_ranks: int
    """Number of ranks, or of devices of a single process."""


@dataclass(frozen=True)
class Digests:
    """Digests of the results of a run, 12 hexadecimal digits each."""

    weights: str
    numbers: str
    checkpoints: str


def prove(
    frameworks: Sequence[str], names: Sequence[str], ranks: Sequence[int], *, slices: int, flags: Sequence[object] = ()
) -> None:
    """Train all runs and print the table; exit with status 1 if a run differs from the first of its framework.

    `flags` are further flags of the trainers.
    """
    first: dict[str, Digests] = {}
    rows = []
    for config in configurations(frameworks, names, ranks, slices):
        words = (config.framework, config.strategy, config.launcher or "-", str(config.num_ranks))
        print(
            f"{config.framework}: {config.strategy}, {config.launcher or 'alone'}, {config.num_ranks}", file=sys.stderr
        )
        digests = train(config, ("--slices", slices, *flags))
        same = first.setdefault(config.framework, digests) == digests
        rows.append([*words, *vars(digests).values(), "" if same else "DIFFERS"])
    header = ["framework", "strategy", "launcher", "ranks", "weights", "numbers", "checkpoints", ""]
    print_table(Table("", header, rows))
    num_others = sum(row[-1] != "" for row in rows)
    print(f"{len(rows)} runs, {num_others} of which differ from the first of their framework")
    if num_others:
        sys.exit(1)


def configurations(
    frameworks: Sequence[str], names: Sequence[str], ranks: Sequence[int], slices: int
) -> Iterator[Configuration]:
    """Yield each strategy of `names` that has --slices with each of its installed launchers, `single` first."""
    for framework in frameworks:
        entries = STRATEGIES[framework].items()
        for name, entry in sorted(entries, key=lambda item: item[0] != "single"):
            if name not in names or "slices" not in entry.flags:
                continue
            numbers = [number for number in ranks if entry.can_have(number) and number <= slices]
            for launcher in _LAUNCHERS.get(name, (None,)):
                if launcher is None or shutil.which(LAUNCHERS[launcher][0]):
                    yield from (Configuration(framework, name, launcher, number) for number in numbers)


def train(config: Configuration, flags: Sequence[object]) -> Digests:
    """Run a trainer as a user would and return its results' digests. Raises Fault with its output if it failed."""
    entry = STRATEGIES[config.framework][config.strategy]
    own = (entry.num_ranks_flag, config.num_ranks) if config.launcher is None and entry.num_ranks_flag else ()
    if "bucket_size" in entry.flags:
        own += ("--bucket-size", _BUCKET_SIZE)
    with scratch_folder("parity") as output_dir:
        words = (*start(config.launcher, config.num_ranks), "-m", f"allstep.{config.framework}.train")
        given = ("--strategy", config.strategy, *own, *_FLAGS, "--output-dir", output_dir, *flags)
        run([*words, *map(str, given)])
        return digests_of(output_dir)


def digests_of(output_dir: Path) -> Digests:
    """Return the digests of the results in a run's output directory."""
    events = [json.loads(line) for line in (output_dir / FILE).read_text().splitlines()]
    numbers = [
        {name: value for name, value in event.items() if name not in _TIMES}
        for event in events
        if event["event"] != "start"  # the start event has the number of ranks
    ]
    files = sorted(output_dir.rglob("*.safetensors"))
    return Digests(
        events[-1]["weights_checksum"][:12],
        _digest(json.dumps(numbers).encode()),
        _digest(*(part for path in files for part in (str(path.relative_to(output_dir)).encode(), path.read_bytes()))),
    )


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]
