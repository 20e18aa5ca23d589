"""Export a trained network to a file that other programs load, and check it there.

    allstep export runs/a --to onnx --output model.onnx
    allstep export runs/a --to state-dict --output resnet.pt --checkpoint best

Formats: state-dict (.pt), safetensors, torch-export (.pt2), onnx, keras (.keras), saved-model (a folder). The file is
loaded again in a fresh process by the format's own runtime, without allstep, and its outputs for 16 validation samples
are compared with those of the run: they must be equal to 1e-5, or there is no file and the exit status is 1. A model
card in Markdown goes next to it. All flags of the trainers may be given besides, as --data-dir for data that moved.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.commands.evaluate.samples import words_for
from allstep.commands.shared.jobs import scratch_folder
from allstep.commands.shared.records.files import written_whole
from allstep.common.base.errors import UserError, first_paragraph, note, print_line, printable, quote
from allstep.common.base.flag_types import Parser, nonempty_path, nonempty_text, one_of
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import parsed
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES
from allstep.common.checkpoint.state import Progress
from allstep.common.cli.command_line import parse, parse_beside
from allstep.common.files.disk import NO_ROOM, named_by_user, try_file
from allstep.common.launch.placement import ALONE
from allstep.common.process.requirements import need
from allstep.common.training.trained import CHECKPOINT_HELP, Trained, open_trained

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.data.datasets import Dataset

NUM_SAMPLES = 16
TOLERANCE = 1e-5
_SECONDS = 600


@dataclass(frozen=True)
class Format:
    """A format of files."""

    suffix: str
    frameworks: tuple[str, ...]
    has_graph: bool = True
    packages: tuple[str, ...] = ()


FORMATS = {
    "state-dict": Format(".pt", ("pytorch",), has_graph=False),
    "safetensors": Format(".safetensors", ("pytorch",), has_graph=False),
    "torch-export": Format(".pt2", ("pytorch",)),
    "onnx": Format(".onnx", FRAMEWORKS, packages=("onnx", "onnxruntime")),
    "keras": Format(".keras", ("tensorflow",)),
    "saved-model": Format("", ("tensorflow",)),
}
_CONVERTERS = {"pytorch": "onnxscript", "tensorflow": "tf2onnx"}
_OF_TORCHVISION = ("resnet18", "resnet50", "vgg16")


def main(argv: Sequence[str] | None = None) -> None:
    """Export, check, and print where the file is."""
    parser = Parser("allstep export", __doc__)
    parser.add_argument("run", type=nonempty_path, metavar="RUN", help="output directory of a run, or a checkpoint")
    parser.add_argument("--to", type=one_of(*FORMATS), required=True, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--output", type=nonempty_path, metavar="FILE", help="by default RUN/export/model.SUFFIX")
    parser.add_argument("--checkpoint", type=nonempty_text, metavar="NAME", help=CHECKPOINT_HELP)
    parser.add_argument("--framework", type=one_of(*FRAMEWORKS), metavar="NAME", help="for onnx; default: the run's")
    parser.add_argument("--ema", action="store_true", help="export the moving averages of the weights")
    parser.add_argument("--with-preprocessing", action="store_true", help="have the graph take samples unscaled")
    flags, given = parse_beside(parser, argv)
    trained = open_trained(flags.run, flags.checkpoint)
    framework = _framework(flags, trained)
    default = flags.run / "export" / f"model{FORMATS[flags.to].suffix}"
    target = named_by_user(flags.output) if flags.output else default
    _check(flags, trained, framework, target)
    config = parse(tuple(STRATEGIES[framework]), ALONE, words_for(trained, ["--strategy", "single", *given]))
    dataset = _dataset(config, trained)
    from allstep.common.api.load import build

    model = config.model if user_file.parse(config.model) else None
    network, progress = build(trained, framework, "cpu", model, ema=flags.ema)
    samples, _ = dataset.validation.read(np.arange(min(NUM_SAMPLES, len(dataset.validation))), epoch=0)
    _export(flags, trained, progress, framework, target, network, config, samples)


def _framework(flags: Any, trained: Trained) -> str:
    frameworks = FORMATS[flags.to].frameworks
    if flags.framework and flags.framework not in frameworks:
        raise UserError(f"--to {flags.to} is written by {frameworks[0]}, not by {flags.framework}")
    chosen = flags.framework or trained.description.framework
    if chosen in frameworks:
        return chosen
    if user_file.parse(trained.description.model):
        raise UserError(f"--to {flags.to} is written by {frameworks[0]}, and the run's network is of {chosen}")
    return frameworks[0]


def _check(flags: Any, trained: Trained, framework: str, target: Path) -> None:
    form = FORMATS[flags.to]
    if form.packages:
        need([*form.packages, _CONVERTERS[framework]], by=f"--to {flags.to}")
    if flags.with_preprocessing and not form.has_graph:
        raise UserError(f"--with-preprocessing needs a format with a graph, {flags.to} has weights alone; leave it out")
    if flags.with_preprocessing and trained.description.input_type == "int64":
        raise UserError("--with-preprocessing is for numbers, this run was trained on tokens; leave it out")
    if target.is_dir():
        raise UserError(f"expected --output to be free, received the folder {quote(target)}; name another")
    try:
        try_file(target)
    except OSError as error:
        raise UserError(f"expected --output that can be written, received {quote(target)}: {error.strerror}") from None


def _dataset(config: TrainConfig, trained: Trained) -> Dataset:
    from allstep.commands.evaluate.samples import fitted
    from allstep.common.data import datasets
    from allstep.common.training.opening import data_flags

    data = data_flags(config, ALONE)
    datasets.prepare(data)
    return fitted(datasets.load(data), data, trained.described, part="validation")


def _export(
    flags: Any,
    trained: Trained,
    progress: Progress,
    framework: str,
    target: Path,
    network: Any,
    config: TrainConfig,
    samples: np.ndarray,
) -> None:
    from allstep.commands.export.card import card

    inputs = network.inputs(samples)
    expected, normalised = network.outputs(inputs), np.asarray(inputs.numpy())
    if flags.with_preprocessing:
        first = framework == "pytorch" and samples.ndim == 4
        normalised = np.ascontiguousarray(np.moveaxis(samples, -1, 1)) if first else samples
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".partial-{os.getpid()}{FORMATS[flags.to].suffix}")  # Keras looks at the suffix
    try:
        _write(flags.to, partial, framework, network, trained, scales=flags.with_preprocessing)
        about = _about(flags.to, config, trained)
        apart, needs_file = _difference(flags.to, partial, normalised, expected, about, network)
        if apart > TOLERANCE:
            note(f"{flags.to} differs from the run by {apart:.3g}, above {TOLERANCE:g}; nothing is written")
            sys.exit(1)
        os.replace(partial, target)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
    shape = ", ".join(map(str, normalised.shape[1:]))
    classes = f"the classes of {Path(about['file']).name}" if about and needs_file else None
    facts = {"scales": flags.with_preprocessing, "samples": f"{normalised.dtype} (n, {shape})", "framework": framework}
    page = target.with_name(f"{target.name}.md")
    with written_whole(page) as stream:
        text = card(trained, progress, flags.to, target.name, **facts, needs=classes)
        stream.write(text.encode(errors="replace"))
    equal = f"outputs for {len(samples)} samples are equal to {apart:.1e}"
    needs = f"; it needs {classes}" if classes else ""
    print_line(printable(f"{target}: {equal}{needs}; its model card is {page}"))


def _write(form: str, path: Path, framework: str, network: Any, trained: Trained, *, scales: bool) -> None:
    loaded = importlib.import_module(f"allstep.{framework}.loaded")
    try:
        loaded.write(form, path, network, trained.description.dataset(), scales=scales)
    except Exception as error:
        _check_room(path)
        reason = str(error) if isinstance(error, UserError) else first_paragraph(error)
        raise UserError(f"--to {form} cannot export --model {trained.description.model}: {reason}") from error


def _check_room(path: Path) -> None:
    """Raise OSError if what was written has no room to grow, which torch tells as `unexpected pos`."""
    try:
        with open(path / "room" if path.is_dir() else path, "ab") as stream:
            stream.write(bytes(2**20))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, os.fspath(path.parent)) from None


def _about(form: str, config: TrainConfig, trained: Trained) -> dict[str, Any] | None:
    """Return what a fresh process may need to load the file: a library's network, or the user's file."""
    if form == "keras":
        file = user_file.parse(config.model)
        return {"file": str(file[0].resolve())} if file else None
    return None if FORMATS[form].has_graph else _library(config, trained)


def _library(config: TrainConfig, trained: Trained) -> dict[str, Any] | None:
    """Return the library's network whose weights have the same names, if there is one."""
    run = trained.description
    library, _, name = config.model.partition(":")
    channels = run.input_shape[-1]
    if config.model in _OF_TORCHVISION and channels == 3:
        library, name = "torchvision", config.model
    elif config.model == "vit-tiny":
        library, name = "timm", "vit_tiny_patch16_224"
    elif library not in ("timm", "torchvision") or (library == "torchvision" and channels != 3):
        return None
    options = parsed(run.model_args)
    if config.model == "vit-tiny" and run.input_shape[:2] != (224, 224):
        options = {"img_size": run.input_shape[:2]}
    return {"library": library, "name": name, "num_classes": run.num_classes, "channels": channels, "options": options}


def _difference(
    form: str, path: Path, samples: np.ndarray, expected: np.ndarray, about: dict[str, Any] | None, network: Any
) -> tuple[float, bool]:
    """Return how far the outputs of a file are from the expected ones, relative to the largest if that is above 1.

    The second value tells whether it can only be loaded with the user's file.
    """
    with scratch_folder("export") as folder:
        ready, found = folder / "samples.npy", folder / "outputs.npz"
        np.save(ready, samples)
        verify = Path(__file__).with_name("verify.py")
        program = [sys.executable, "-I", verify, form, path.name, ready, found, json.dumps(about)]
        environ = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        options = {"env": environ, "capture_output": True, "text": True, "timeout": _SECONDS}
        try:  # by its name alone: some runtimes open no path that is not UTF-8
            done = subprocess.run(program, cwd=path.resolve().parent, **options)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"--to {form}: loading the file takes longer than {_SECONDS} s; nothing is written"
            ) from None
        if done.returncode:
            *_, reason = ["no reason", *done.stderr.strip().splitlines()]
            raise UserError(f"--to {form}: the file cannot be loaded again: {quote(reason)}; nothing is written")
        with np.load(found) as outputs:
            needs_file = "needs_file" in outputs.files
            found_outputs = [outputs[name] for name in outputs.files if name.startswith("outputs/")]
            if not found_outputs:  # weights alone, which must be the same
                weights = {name.removeprefix("model/") for name in network.shapes()}
                state = network.model.state_dict()
                same = weights <= set(outputs.files) and all(
                    np.array_equal(outputs[name], state[name].cpu().numpy()) for name in weights
                )
                return 0.0 if same else float("inf"), False
            differences = [
                np.abs(one.astype(np.float64).reshape(expected.shape) - expected).max()
                for one in found_outputs  # of several, the logits are those that are equal
                if one.size == expected.size
            ]
    apart = min(filter(np.isfinite, differences), default=np.inf)
    return float(apart / max(1.0, np.abs(expected).max())), needs_file
