"""Compare reading users' data sets in the order of training with reading them in the order of the files:

    OMP_NUM_THREADS=1 python -m allstep.benchmarks.user_data [--rounds N] [--quick]

A sample is 3,072 numbers, as many as a small colour image. The files are in the page cache; both orders are read in
turn, in batches of 64, by the same reader. Rates are per second of processor time, which other programs hardly affect.
The size of the index of 10^6 samples is measured, too. The exit status is 0 if all targets are reached, 1 otherwise.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from allstep.commands.shared.measure import Figure, interleaved, median_ratio, print_table
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, whole
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.datasets.base import Split
from allstep.common.data.formats.sample_index import Located, build_index, open_index
from allstep.common.data.sharding import sample_order
from allstep.common.process.exit import run_rank

NUM_NUMBERS = 3072
BATCH_SIZE = 64
INDEXED = 10**6
MAX_INDEX_MEGABYTES = 50


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with status 1 if a target is missed."""
    parser = Parser("python -m allstep.benchmarks.user_data", __doc__)
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=9, metavar="N", help="rounds of both orders")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    flags = parser.parse_args(argv)
    num_samples = 1024 if flags.quick else 10_240
    with tempfile.TemporaryDirectory(prefix="allstep-data-") as name:
        figures = [order_figure(Path(name), kind, num_samples, flags.rounds) for kind in WRITERS]
        figures.append(index_figure(Path(name), INDEXED // 10 if flags.quick else INDEXED))
    print_table(figures)
    sys.exit(0 if all(figure.reached for figure in figures) else 1)


def order_figure(folder: Path, kind: str, num_samples: int, num_rounds: int) -> Figure:
    """Compare samples per second of processor time in the order of training and in the order of the files."""
    (folder / kind).mkdir()
    numbers = np.random.default_rng(0).normal(size=(num_samples, NUM_NUMBERS)).astype(np.float32)
    WRITERS[kind](folder / kind, numbers)
    config = DataConfig(f"{kind}:{folder / kind}", data_dir=folder / "cache")
    datasets.prepare(config)
    train = datasets.load(config).train
    positions = np.arange(len(train))
    orders = {"random": sample_order(positions, len(train), seed=0, epoch=0), "sequential": positions}
    _rate(train, positions)  # every page is mapped once
    rates = interleaved({name: lambda order=order: _rate(train, order) for name, order in orders.items()}, num_rounds)
    random, sequential = rates["random"], rates["sequential"]
    ratio = median_ratio(random, sequential)
    what = f"{kind}: samples/s, random / sequential"
    return Figure(what, float(np.median(random)), float(np.median(sequential)), ratio, ">= 0.9")


def index_figure(folder: Path, num_samples: int) -> Figure:
    """Compare the megabytes of an index of `num_samples` samples, scaled to 10^6, with the limit."""
    path = folder / "many"
    path.touch()
    config = DataConfig(f"tfrecord:{folder}", data_dir=folder / "cache")
    build_index(
        [path], lambda _, passed: (Located(number, 100, number % 1000) for number in range(num_samples)), config
    )
    megabytes = open_index([path], config).records.nbytes / 1e6 * INDEXED / num_samples
    what = "index of 10^6 samples: MB / most"
    return Figure(what, megabytes, MAX_INDEX_MEGABYTES, megabytes / MAX_INDEX_MEGABYTES, "<= 1")


def _rate(train: Split, order: np.ndarray) -> float:
    started = time.process_time()
    for begin in range(0, len(order), BATCH_SIZE):
        train.read(order[begin : begin + BATCH_SIZE], epoch=0)
    return len(order) / (time.process_time() - started)


def _write_tfrecord(folder: Path, numbers: np.ndarray) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    from allstep.common.data.formats.example_proto import example_class

    with (folder / "a.tfrecord").open("wb") as stream:
        writer = RecordWriter(stream)
        for number, row in enumerate(numbers):
            example = example_class()()
            for name, kind, values in (("x", "float_list", row), ("y", "int64_list", [number % 10])):
                entry = example.features.feature.add(key=name.encode())
                getattr(entry.value, kind).value.extend(values)
            writer.write(example.SerializeToString())


def _write_webdataset(folder: Path, numbers: np.ndarray) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, row in enumerate(numbers):
            array = io.BytesIO()
            np.save(array, row)
            for ending, data in (("npy", array.getvalue()), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"{number:08}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _write_parquet(folder: Path, numbers: np.ndarray) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), NUM_NUMBERS)
    parquet.write_table(pa.table({"x": rows, "y": np.arange(len(numbers)) % 10}), folder / "a.parquet")


WRITERS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "tfrecord": _write_tfrecord,
    "webdataset": _write_webdataset,
    "parquet": _write_parquet,
}

if __name__ == "__main__":
    run_rank(main)
