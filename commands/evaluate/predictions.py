"""Predictions of each sample, collected over ranks, as a table in a CSV, Parquet or JSON Lines file."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from allstep.commands.evaluate.samples import path_of
from allstep.commands.shared.records.files import output_file, written_whole
from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import wrong
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import rank_slice
from allstep.common.process.requirements import need
from allstep.common.training.metrics import best_classes

_SUFFIXES = (".csv", ".parquet", ".jsonl")


def predictions_file(word: str) -> Path:
    """Parse --predictions, and check that the file can be written."""
    if not word.endswith(_SUFFIXES):
        raise wrong(f"to be a file that ends in {', '.join(_SUFFIXES)}", word, "name such a file")
    if word.endswith(".parquet"):
        need(["pyarrow"], by="--predictions FILE.parquet")
    return output_file(word)


class Predictions:
    """Predictions of the validation samples of a data set: this rank's until `collect`, then all."""

    def __init__(self, dataset: Dataset, num_best: int, collectives: Collectives, *, labelled: bool = True) -> None:
        """Prepare a row for each sample, with the `num_best` most probable classes; `labelled` samples have targets.

        Raises UserError if samples are texts, whose every token has a prediction.
        """
        if dataset.task == "next-token":
            raise UserError("--predictions is for one prediction a sample, this run predicts each token; leave it out")
        self._dataset, self._collectives, self._labelled = dataset, collectives, labelled
        self._are_classes = dataset.task == "classification"
        self._num_best = min(num_best, dataset.num_classes) if self._are_classes else dataset.num_classes
        num_targets = 1 if self._are_classes else dataset.num_classes
        self._rows = np.zeros((len(dataset.validation), num_targets + self._num_best * (1 + self._are_classes)))
        self._num_targets = num_targets

    def see(self, batch: Batch, outputs: np.ndarray) -> None:
        """Note the outputs of this rank's samples of a global batch."""
        stop = batch.position.offset
        ranks = {"rank": self._collectives.rank, "world_size": self._collectives.world_size}
        begin, end = rank_slice(stop - batch.num_global, stop, **ranks)
        rows = self._rows[begin:end]
        rows[:, : self._num_targets] = batch.targets.reshape(len(outputs), -1)
        if not self._are_classes:
            rows[:, self._num_targets :] = outputs
            return
        rows[:, self._num_targets :] = np.concatenate(best_classes(outputs, self._num_best), axis=1)

    def collect(self) -> None:
        """Gather the rows of all ranks; all ranks call it together."""
        self._rows = self._collectives.all_reduce_sum(self._rows.ravel()).reshape(self._rows.shape)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the columns of each sample, in the order of the data set."""
        names = self._dataset.class_names
        for index, row in enumerate(self._rows):
            path = path_of(self._dataset.validation, index)
            columns: dict[str, Any] = {"index": index} if path is None else {"path": path}
            targets, rest = row[: self._num_targets], row[self._num_targets :]
            if not self._are_classes:
                numbered = range(self._num_best)
                targets = {f"target_{number}": float(targets[number]) for number in numbered if self._labelled}
                yield {**columns, **targets, **{f"output_{number}": float(rest[number]) for number in numbered}}
                continue
            best = [names[int(one)] if names else int(one) for one in rest[: self._num_best]]
            if self._labelled:
                columns["target"] = names[int(targets[0])] if names else int(targets[0])
            columns["predicted"] = best[0]
            for number, (name, share) in enumerate(zip(best, rest[self._num_best :], strict=True), 1):
                columns |= {f"class_{number}": name, f"probability_{number}": float(share)}
            yield columns

    def write(self, path: Path) -> None:
        """Write the rows in the format that the ending of the path names.

        Raises UserError if the file cannot be written; an earlier one stays.
        """
        rows = list(self.rows())
        with written_whole(path) as stream:
            if path.suffix == ".parquet":
                import pyarrow as pa
                import pyarrow.parquet

                safe = [{name: _storable(value) for name, value in row.items()} for row in rows]
                pyarrow.parquet.write_table(pa.Table.from_pylist(safe), stream)
            elif path.suffix == ".jsonl":
                stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            else:
                text = io.StringIO(newline="")
                writer = csv.DictWriter(text, rows[0])
                writer.writeheader()
                writer.writerows(rows)
                stream.write(text.getvalue().encode("utf-8", "surrogateescape"))


def _storable(value: Any) -> Any:
    """Return text with a mark for each byte that is not UTF-8, which names of files may have."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value
