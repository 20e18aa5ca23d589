"""Evaluate a trained network: loss, metrics and predictions, each sample exactly once, on any number of ranks.

    allstep evaluate runs/a
    horovodrun -np 4 allstep evaluate runs/a --checkpoint best --dataset image-folder --data-dir DIR --split test
    allstep evaluate runs/a --metrics f1 confusion-matrix --predictions p.csv
    allstep evaluate runs/a --images DIR --predictions p.csv

RUN is the output directory of a run, a checkpoint, or a .safetensors file together with --model and --dataset. The data
set, its preprocessing and the network are those of the run; all flags of the trainers may be given besides. Under a
launcher, every host reads RUN. A run directory is data: its FILE.py:FUNCTION is imported only if you name it here too.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.commands.evaluate.samples import fitted, path_of, unlabelled, words_for
from allstep.commands.shared.records.files import output_file, written_whole
from allstep.common.api.user_parts import Parts
from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError, print_line, printable, quote
from allstep.common.base.flag_types import (
    Parser,
    flag_name,
    flag_value,
    nonempty_path,
    nonempty_text,
    one_of,
    whole,
    wrong,
)
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.cli.command_line import parse_beside
from allstep.common.cli.data_validation import DATA_FLAGS
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import rank_slice
from allstep.common.process.requirements import need
from allstep.common.training.metrics import best_classes
from allstep.common.training.saving import broadcast_state
from allstep.common.training.start import start
from allstep.common.training.trained import CHECKPOINT_HELP, Trained, open_trained

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.data.datasets import Dataset
    from allstep.common.launch.placement import Placement
    from allstep.common.training.metrics import Evaluation
    from allstep.common.training.training_run import TrainingRun


SPLITS = ("validation", "train", "test")
_OFFICIAL_TESTS = ("mnist", "fashion-mnist", "cifar10")
"""Data sets whose validation part is the published test part."""
_OF_TRAINING = ("output-dir", "resume", "init-from", "slices", "curriculum", "ema", "skip-unreadable", "elastic")


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, print the results on rank 0 and write the files."""
    parser = Parser("allstep evaluate", __doc__)
    parser.add_argument("run", type=nonempty_path, metavar="RUN", help="output directory, checkpoint or weights")
    parser.add_argument("--checkpoint", type=nonempty_text, metavar="NAME", help=CHECKPOINT_HELP)
    parser.add_argument("--framework", type=one_of(*FRAMEWORKS), metavar="NAME", help="default: the run's")
    parser.add_argument("--split", type=one_of(*SPLITS), default=SPLITS[0], metavar="PART", help=", ".join(SPLITS))
    parser.add_argument("--ema", action="store_true", help="evaluate the moving averages of the weights")
    rows = "write a row for each sample: .csv, .parquet or .jsonl"
    parser.add_argument("--predictions", type=predictions_file, metavar="FILE", help=rows)
    parser.add_argument("--top", type=whole(1, 1000), default=5, metavar="K", help="classes of a row, 5 by default")
    parser.add_argument("--images", type=nonempty_path, metavar="DIR", help="pictures without classes to predict")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the results as JSON")
    flags, given = parse_beside(parser, argv)
    _check(flags, given)
    trained = open_trained(flags.run, flags.checkpoint)
    framework = flags.framework or (trained.manifest.framework if trained.manifest else FRAMEWORKS[0])
    given = [*given, *_part_of(flags.split, trained, given)]
    train = importlib.import_module(f"allstep.{framework}.train")
    config, placement = start(train.strategies, words_for(trained, given))
    session = train.session(config, placement, (), _parts(flags, trained, config, placement))
    if session is not None:
        _evaluate(session, trained, flags)


def _check(flags: Any, given: Sequence[str]) -> None:
    for name in map(flag_name, given):
        if name in _OF_TRAINING:
            raise UserError(f"--{name} is for training, not for allstep evaluate; leave it out")
    if flags.output and flags.predictions and flags.output.resolve() == flags.predictions.resolve():
        raise UserError(f"--output and --predictions name one file, {quote(flags.output)}; name two")
    if flags.images and not flags.predictions:
        raise UserError("--images needs --predictions FILE, since pictures without classes have no metrics")


def _part_of(split: str, trained: Trained, given: Sequence[str]) -> list[str]:
    """Return the flag that chooses the part to evaluate."""
    dataset = flag_value(given, "dataset") or trained.config.get("dataset")
    if split != "test" or dataset is None or dataset in _OFFICIAL_TESTS:
        return []
    if DataConfig(dataset=dataset).kind not in DATA_FLAGS["validation_part"]:
        raise UserError(f"--split test: --dataset {quote(dataset)} has no test part; give --split validation")
    return ["--validation-part", "test"]


def _parts(flags: Any, trained: Trained, config: TrainConfig, placement: Placement) -> Parts:
    if flags.images:
        return Parts(unlabelled(flags.images, trained.description, config.data, placement))
    part = "train" if flags.split == "train" else "validation"
    return Parts(adapt=lambda dataset: fitted(dataset, config.data, trained.described, part=part))


def _evaluate(session: TrainingRun, trained: Trained, flags: Any) -> None:
    worker, is_first = session.worker, session.placement.rank == 0
    state = trained.weights(worker.state_shapes(), averaged=flags.ema) if is_first else None
    worker.import_state(broadcast_state(state, worker.collectives).arrays, step=0)
    labelled = flags.images is None
    predictions = None
    if flags.predictions:
        predictions = Predictions(session.dataset, flags.top, worker.collectives, labelled=labelled)
    found = session.evaluate(predictions.see if predictions else lambda batch, outputs: None)
    if predictions:
        predictions.collect()
    if not math.isfinite(found.loss) and labelled:
        raise UserError(f"expected a finite loss, received {found.loss}: the weights do not fit these samples")
    if not is_first:
        return
    if labelled:
        for line in _lines(found, session.dataset):
            print_line(line)
    if predictions:
        predictions.write(flags.predictions)
        print_line(f"{found.num_samples} predictions are in {quote(flags.predictions)}", sys.stderr)
    if flags.output:
        step = state.progress.step if state and trained.manifest else None
        result = {"run": str(trained.run), "step": step, "split": flags.split, "samples": found.num_samples}
        result |= {"loss": found.loss, **found.metrics} if labelled else {}
        with written_whole(flags.output) as stream:
            stream.write(json.dumps(result, allow_nan=False).encode())


def _lines(found: Evaluation, dataset: Dataset) -> list[str]:
    """Return the results in words: one line of numbers, then a line for each class."""
    numbers = {"loss": found.loss, **found.metrics}
    shown = [f"{_title(name)} = {_row(value)}" for name, value in numbers.items() if not isinstance(value, list)]
    lines = [f"Samples = {found.num_samples}, {', '.join(shown)}"]
    for name, values in numbers.items():
        if isinstance(values, list):
            labels = dataset.class_names if len(dataset.class_names) == len(values) else range(len(values))
            lines.append(f"{_title(name)}:")
            lines += [f"  {printable(str(label))}: {_row(value)}" for label, value in zip(labels, values, strict=True)]
    return lines


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _row(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not finite" if value is None else f"{value:.6g}"


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
            best = [names[int(one)] if one < len(names) else int(one) for one in rest[: self._num_best]]
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
