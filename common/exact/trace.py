"""Traces of --trace: 64-bit digests of each step's inputs, gradients and weights on every rank.

Each rank has two files in the folder `trace` of the output directory: `rank-N.json` describes the columns and the run's
machine, and `rank-N.digests` is a ring buffer with a row per step. The ring is mapped into memory, so it has every step
that ended before the process was killed. `allstep bisect` compares the traces of two runs.

Digests of arrays in GPU memory are computed on the GPU, and differ from those of `replica_check.digest`. A digest of 0
means "not recorded".
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.data.loader import Batch
from allstep.common.exact.replica_check import digest
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular, regular
from allstep.common.files.strict_json import Count, Mismatch, from_json, to_json
from allstep.common.reporting.base import output_dir_errors, write_whole

FOLDER = "trace"
FORMAT = 2
_RING_BYTES, _MAX_ROWS = 16 * 2**20, 2**16
_MAX_HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Header:
    """Columns of a rank's digests, and the machine and configuration of the run."""

    rank: int
    world_size: Count
    local_size: Count
    framework: str
    launcher: str | None
    host: str
    processor: str
    device: str
    """Device type: cpu or cuda."""
    num_threads: int | None
    """Value of OMP_NUM_THREADS, if it was set."""
    versions: dict[str, str]
    config: dict[str, Any]
    """Flags as in config.yaml."""
    slices: Count | None
    """Number of parts of a global batch with separate gradients, as in `StrategyConfig.num_slices`."""
    activations: tuple[str, ...]
    """Names of the modules that directly hold weights, in the order of the backward pass."""
    parameters: tuple[str, ...]
    """Names of the trainable weights, in the same order."""
    format: Count = FORMAT

    @property
    def num_parts(self) -> int:
        """Number of parts of a global batch with separate digests: the slices, or 1 for this rank's share."""
        return self.slices or 1

    @property
    def row_type(self) -> np.dtype:
        """Type of a row; the fields are in the order in which a fault spreads from one to the next."""
        activations, parameters = len(self.activations), len(self.parameters)
        return np.dtype(
            [
                ("step", np.int64),
                ("inputs", np.int64, (self.num_parts,)),
                ("targets", np.int64, (self.num_parts,)),
                ("learning_rate", np.int64, (1,)),  # the bits of a float64
                ("weights_before", np.int64, (parameters,)),
                ("activations", np.int64, (self.num_parts, activations)),
                ("local_gradients", np.int64, (self.num_parts, parameters)),
                ("reduced_gradients", np.int64, (parameters,)),
                ("weights_after", np.int64, (parameters,)),
            ]
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of the ring."""
        return min(_MAX_ROWS, max(2, _RING_BYTES // self.row_type.itemsize))


class Recorder:
    """Writes the trace of this rank."""

    def __init__(self, folder: Path, header: Header, step: int) -> None:
        """Continue the existing trace after `step` steps if it has the same header fields, or else start a new one.

        Raises UserError if the folder cannot be written.
        """
        self.header, self._step = header, step
        (header_file, digests), row_type = _files(folder, header.rank), header.row_type
        with output_dir_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            size = header.num_rows * row_type.itemsize
            if not _can_continue(header_file, digests, header, size):
                digests.unlink(missing_ok=True)
            write_whole(header_file, json.dumps(to_json(header)))
            with open(digests, "ab", opener=regular) as stream:
                # A full disk is an error here; without this call, writing to the mapped ring would kill the process.
                os.posix_fallocate(stream.fileno(), 0, size)
            self._ring = np.memmap(digests, row_type, "r+", shape=(header.num_rows,))

    def begin(self, batch: Batch, learning_rate: float) -> np.ndarray:
        """Return the row of the next step, () of the header's type, with step, inputs, targets and rate filled in."""
        self._step += 1
        row = np.zeros((), self.header.row_type)
        row["step"], row["learning_rate"] = self._step, np.float64(learning_rate).view(np.int64)
        if batch.slices:
            parts = [(one.number, slice(one.begin, one.end)) for one in batch.slices if one.end > one.begin]
        else:
            parts = [(0, slice(0, batch.num_samples))] if batch.num_samples else []
        for number, samples in parts:
            row["inputs"][number] = digest(batch.inputs[samples])
            row["targets"][number] = digest(batch.targets[samples])
        return row

    def write(self, row: np.ndarray) -> None:
        """Write a row to the ring, over the oldest one if the ring is full."""
        slot = self._ring[int(row["step"]) % len(self._ring)]
        slot["step"] = 0  # a row that is half written when the process is killed does not count
        for name in (self.header.row_type.names or ())[1:]:
            slot[name] = row[name]
        slot["step"] = row["step"]


OpenRecorder = Callable[[Sequence[str], Sequence[str]], Recorder]
"""Function that takes names of modules and of weights, in the order of the backward pass, and returns a recorder."""


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return a rank's files of the header and of the digests."""
    return folder / f"rank-{rank}.json", folder / f"rank-{rank}.digests"


def _can_continue(header_file: Path, digests: Path, header: Header, size: int) -> bool:
    """Return whether the files hold rows that this run can continue: with the same columns and number of ranks."""
    if not (header_file.exists() and digests.exists() and digests.stat().st_size == size):
        return False
    try:
        before = _read_header(header_file)
    except UserError:
        return False
    return replace(before, config=header.config, versions=header.versions, host=header.host) == header


@dataclass(frozen=True)
class Trace:
    """Trace of a run."""

    headers: tuple[Header, ...]
    """Headers by rank."""
    rows: tuple[np.ndarray, ...]
    """Rows by rank, of the header's type, in the order of steps."""

    @property
    def first(self) -> Header:
        """Header of rank 0."""
        return self.headers[0]


def read(output_dir: Path) -> Trace:
    """Read the trace in the output directory of a run.

    Raises UserError if the trace is damaged, or that of a rank is missing.
    """
    folder = output_dir / FOLDER
    if not (folder / "rank-0.json").exists():
        raise UserError(
            f"expected the output directory of a run with --trace, received {quote(output_dir)}, which has no trace of "
            "rank 0; train with --trace"
        )
    first = _read_header(_files(folder, 0)[0])
    headers = [first, *(_read_header(_files(folder, rank)[0]) for rank in range(1, first.world_size))]
    for rank, header in enumerate(headers):
        if replace(header, **_OF_ONE_RANK, rank=0) != replace(first, **_OF_ONE_RANK, rank=0) or header.rank != rank:
            raise UserError(
                f"expected traces of one run of {first.world_size} ranks in {quote(folder)}, received that of another "
                f"one for rank {rank}; bring together the files of all hosts"
            )
    return Trace(tuple(headers), tuple(_read_rows(_files(folder, h.rank)[1], h) for h in headers))


_OF_ONE_RANK: Mapping[str, Any] = {"host": "", "processor": "", "local_size": 1, "num_threads": None}
"""Header fields that may differ between ranks of one run."""


def _read_header(path: Path) -> Header:
    try:
        header = from_json(Header, strict_json.loads(read_regular(path, maximum=_MAX_HEADER_BYTES)), "header")
        if header.format != FORMAT or not header.parameters:
            raise Mismatch(f"expected parameters, in format {FORMAT}, received format {header.format}")
    except (OSError, strict_json.NotJson, Mismatch) as error:
        raise _unreadable(path, error) from None
    return header


def _read_rows(path: Path, header: Header) -> np.ndarray:
    row_type, size = header.row_type, header.num_rows * header.row_type.itemsize
    try:
        data = read_regular(path, maximum=size)
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) != size:
        raise _unreadable(path, f"expected {size} bytes, received {len(data)}")
    rows = np.frombuffer(data, row_type)
    rows = rows[rows["step"] > 0]
    return rows[np.argsort(rows["step"])]


def _unreadable(path: Path, why: object) -> UserError:
    return UserError(f"expected a readable file of a trace, received {quote(path)}: {why}; trace the run again")
