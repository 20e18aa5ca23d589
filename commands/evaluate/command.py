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

import importlib
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allstep.commands.evaluate.predictions import Predictions, predictions_file
from allstep.commands.evaluate.samples import fitted, unlabelled, words_for
from allstep.commands.shared.records.files import output_file, written_whole
from allstep.common.api.user_parts import Parts
from allstep.common.base.errors import UserError, print_line, printable, quote
from allstep.common.base.flag_types import Parser, flag_name, flag_value, nonempty_path, nonempty_text, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.cli.command_line import parse_beside
from allstep.common.cli.data_validation import DATA_FLAGS
from allstep.common.config.data_config import DataConfig
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
