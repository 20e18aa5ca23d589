"""Checkpoints that were changed, with checksums recomputed, and files that are no checkpoints.

Oracle: the contract of mistakes, in `mistake.check`; and a run resumes from the same checkpoint without the change.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import forward
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_states import forge, forge_file, refuse_warning
from hostile_files import sparse
from mistake import PYTORCH, TENSORFLOW, Mistake, check
from ranks import run

from allstep.common.checkpoint import Checkpoints, OutputDirectory, Progress, TrainState
from allstep.common.config.train_config import TrainConfig
from allstep.common.recipe.schedule import Schedule

NUM_SAMPLES = 1437  # of digits
FLAGS = "--model mlp --epochs 3"
STEP = "run/checkpoints/step-00000002"
RESUME = f"{FLAGS} --resume {{here}}/{STEP}"
SHAPES = forward.shapes("mlp", (8, 8, 1), 10)


def put(folder: Path) -> Path:
    """Write the checkpoint that a run of FLAGS would have written after two steps of 32 samples."""
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    slots = {f"optimizer/{name}/momentum": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    running = {"loss_sum": 147.0, "learning_rate": 0.01, "epoch_seconds": 0.5, "cumulative_seconds": 0.0}
    running |= {"best_validation_loss": math.inf, "epochs_without_gain": 0}
    schedule = Schedule(base_lr=0.01, samples_per_epoch=NUM_SAMPLES, num_epochs=3, global_batch_size=32)
    state = TrainState(
        "pytorch",
        {f"model/{name}": array for name, array in weights.items()} | slots,
        Progress(epoch=0, offset=64, step=2, samples_seen=64, running=running),
        rng={"seed": 0},
        schedule=json.loads(json.dumps(dataclasses.asdict(schedule))),
        config=dataclasses.replace(TrainConfig(), model="mlp").flat(),
    )
    with OutputDirectory(folder / "run", warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        checkpoints.save(state)
        checkpoints.close()
    return folder / STEP


def changed(*path: str, to: object) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint and changes or deletes (...) the manifest's value at `path`."""

    def prepare(folder: Path) -> None:
        directory = put(folder)
        content = json.loads((directory / "manifest.json").read_text())
        *parents, last = path
        placement = content
        for name in parents:
            placement = placement[name]
        if to is ...:
            del placement[last]
        else:
            placement[last] = to
        (directory / "manifest.json").write_text(json.dumps(content))
        forge(directory)

    return prepare


def with_arrays(group: str, change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint and changes some of its arrays."""

    def prepare(folder: Path) -> None:
        path = put(folder) / f"{group}.safetensors"
        arrays = safetensors.numpy.load(path.read_bytes())
        change(arrays)
        forge_file(path.parent, path.name, safetensors.numpy.save(arrays))

    return prepare


def cast(dtype: type) -> Callable[[Path], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays.update({name: (10 * array).astype(dtype) for name, array in arrays.items()})

    return with_arrays("model", change)


def with_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint and replaces one of its files by the output of `make`."""

    def prepare(folder: Path) -> None:
        path = put(folder) / name
        path.unlink()
        make(path)

    return prepare


def sparse_and_listed(path: Path) -> None:
    sparse(path)
    files = json.loads(path.with_name("manifest.json").read_text())["files"]
    files[path.name]["size"] = path.stat().st_size
    forge(path.parent, files=files)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def after_an_epoch(folder: Path) -> None:
    directory = put(folder)
    progress = json.loads((directory / "manifest.json").read_text())["progress"]
    progress |= {"epoch": 1, "step": 46, "samples_seen": NUM_SAMPLES + 64}
    forge(directory, progress=progress)
    directory.rename(directory.with_name("step-00000046"))


def of_other_data(folder: Path) -> None:
    directory = put(folder)
    schedule = json.loads((directory / "manifest.json").read_text())["schedule"]
    forge(directory, schedule={**schedule, "samples_per_epoch": 1000})


def nan(arrays: dict[str, np.ndarray]) -> None:
    arrays["fc1.bias"][3] = math.nan


def field(expected: str, received: str, *path: str, to: object, program: str = PYTORCH) -> Mistake:
    return Mistake(f"{program} {RESUME}", expected, received, prepare=changed(*path, to=to))


def file(expected: str, received: str, name: str, make: Callable[[Path], object]) -> Mistake:
    return Mistake(f"{PYTORCH} {RESUME}", expected, received, prepare=with_file(name, make))


def arrays(expected: str, received: str, prepare: Callable[[Path], None], program: str = PYTORCH) -> Mistake:
    return Mistake(f"{program} {RESUME}", expected, received, prepare=prepare)


MANIFEST = {
    "no format": field("manifest to have format_version", "'checksum'", "format_version", to=...),
    "format 0": field("manifest.format_version", "0", "format_version", to=0),
    "format true": field("manifest.format_version", "True", "format_version", to=True),
    "sequence 1e30": field("manifest.sequence", "100000", "sequence", to=10**30),
    "sequence a text": field("manifest.sequence", "'1'", "sequence", to="1"),
    "created yesterday": field("manifest.created", "'yesterday'", "created", to="yesterday"),
    "metric a text": field("manifest.metric", "'high'", "metric", to="high"),
    "framework jax": field("'pytorch', 'tensorflow'", "'jax'", "framework", to="jax"),
    "versions numbers": field("manifest.versions.torch", "2", "versions", to={"torch": 2}),
    "progress null": field("manifest.progress to be an object", "None", "progress", to=None),
    "no offset": field("manifest.progress to have offset", "['epoch'", "progress", "offset", to=...),
    "epoch 1e30": field("manifest.progress.epoch", "100000", "progress", "epoch", to=10**30),
    "epoch after the last": field("manifest.progress.epoch", "4", "progress", "epoch", to=4),
    "epoch a float": field("manifest.progress.epoch", "1.0", "progress", "epoch", to=1.0),
    "offset 1e9": field("manifest.progress.offset", "1000000000", "progress", "offset", to=10**9),
    "offset negative": field("manifest.progress.offset", "-1", "progress", "offset", to=-1),
    "offset moved": field("manifest.progress.samples_seen to be 96", "64", "progress", "offset", to=96),
    "step 0": field("progress.step, as the folder's name has it,", "0", "progress", "step", to=0),
    "step 1e9": field("progress.step, as the folder's name has it,", "1000000000", "progress", "step", to=10**9),
    "no loss": field("manifest.progress.running to have loss_sum", "[", "progress", "running", "loss_sum", to=...),
    "loss a list": field("running.loss_sum", "[1]", "progress", "running", "loss_sum", to=[1]),
    "learning rate a text": field("learning_rate", "'0.1'", "progress", "running", "learning_rate", to="0.1"),
    "no time": field("epoch_seconds to be above 0", "0", "progress", "running", "epoch_seconds", to=0.0),
    "time of ages": field("cumulative_seconds", "1e+300", "progress", "running", "cumulative_seconds", to=1e300),
    "epochs without gain": field("epochs_without_gain", "9", "progress", "running", "epochs_without_gain", to=9),
    "no seed": field("manifest.rng to have seed", "[]", "rng", "seed", to=...),
    "another generator": field("manifest.rng.seed to be 0", "7", "rng", "seed", to=7),
    "no schedule": field("manifest.schedule to have", "[]", "schedule", to={}),
    "global batch 1e18": field("global_batch_size", "10000000000", "schedule", "global_batch_size", to=10**18),
    "global batch 0": field("--global-batch-size to be at least 1", "0", "schedule", "global_batch_size", to=0),
    "global batch a text": field("global_batch_size", "'32'", "schedule", "global_batch_size", to="32"),
    "no samples": field("number of training samples to be at least 1", "0", "schedule", "samples_per_epoch", to=0),
    "decay unknown": field("manifest.schedule.decay", "'never'", "schedule", "decay", to="never"),
    "base_lr 0": field("--base-lr to be above 0", "0", "schedule", "base_lr", to=0),
    "config null": field("manifest.config to be an object", "None", "config", to=None),
    "no data set": field("manifest.config to have dataset", "[", "config", "dataset", to=...),
    "data set of codes": field("manifest.config.dataset", "'\\x1b[2J\\n", "config", "dataset", to="\x1b[2J\n"),
    "model a list": field("manifest.config.model", "['mlp']", "config", "model", to=["mlp"]),
    "files elsewhere": field(
        "manifest.files to have", "['/etc/passwd']", "files", to={"/etc/passwd": {"size": 1, "sha256": "0" * 64}}
    ),
    "TensorFlow, epoch 1e30": field(
        "manifest.progress.epoch", "100000", "progress", "epoch", to=10**30, program=TENSORFLOW
    ),
}

FILES = {
    "manifest a FIFO": file("a regular file", "a FIFO", "manifest.json", os.mkfifo),
    "weights a FIFO": file("a regular file", "a FIFO", "model.safetensors", os.mkfifo),
    "weights of 40 GB": file("the memory that is left", "80000000000", "model.safetensors", sparse_and_listed),
    "manifest of 40 GB": file("at most 67108864 bytes", "40000000000", "manifest.json", sparse),
    "manifest a folder": file("a regular file", "a directory", "manifest.json", Path.mkdir),
    "manifest cut": file("JSON", "brackets that do not pair", "manifest.json", text('{"format_version": 1')),
    "manifest nested": file("nested at most 32 deep", "more", "manifest.json", text("[" * 10**5)),
    "manifest twice a key": file("every key once", "'a' twice", "manifest.json", text('{"a": 1, "a": 2}')),
    "manifest NaN": file("numbers that JSON has", "NaN", "manifest.json", text('{"a": NaN}')),
    "manifest many digits": file("JSON", "digits", "manifest.json", text("1" * 6000)),
    "nothing there": Mistake(f"{PYTORCH} {FLAGS} --resume {{here}}/nowhere", "path of a checkpoint", "nowhere"),
    "a file": Mistake(
        f"{PYTORCH} {FLAGS} --init-from {{here}}/f",
        "path of a checkpoint",
        "{here}/f: a file of another kind; convert",
        prepare=lambda p: (p / "f").touch(),
    ),
    "weights": Mistake(
        f"{PYTORCH} {FLAGS} --resume {{here}}/m.safetensors",
        "path of a checkpoint",
        "weights alone; give --init-from",
        prepare=lambda p: (p / "m.safetensors").touch(),
    ),
    "weights of a checkpoint": Mistake(
        f"{PYTORCH} {FLAGS} --resume {{here}}/model.safetensors",
        "path of a checkpoint",
        "a file in a checkpoint; name its folder, {here}",
        prepare=lambda p: (p / "manifest.json").touch(),
    ),
    "latest of nothing": Mistake(f"{PYTORCH} --output-dir {{here}} --resume latest", "a checkpoint in", "none"),
    "latest of what": Mistake(f"{PYTORCH} --resume latest", "--output-dir with --resume latest", "none"),
}

OTHER_RUNS = {
    "another seed": Mistake(f"{PYTORCH} {RESUME} --seed 1", "--seed 0", "1", prepare=put),
    "another model": Mistake(f"{PYTORCH} {RESUME} --model cnn", "--model mlp", "cnn", prepare=put),
    "another data set": Mistake(
        f"{PYTORCH} {RESUME} --dataset synthetic", "--dataset digits", "synthetic", prepare=put
    ),
    "fewer epochs": Mistake(
        f"{PYTORCH} {FLAGS} --resume {{here}}/run/checkpoints/step-00000046 --epochs 1",
        "--epochs to be at least 2",
        "1",
        prepare=after_an_epoch,
    ),
}


# These are found when the network is known, after the framework is imported.
ARRAYS = {
    "weights int64": arrays("model/fc1.weight in float32", "int64", cast(np.int64)),
    "weights nan": arrays("finite numbers", "nan or inf in 'fc1.bias'", with_arrays("model", nan)),
    "weights of another shape": arrays(
        "model/fc2.bias (128,)", "(64,)", with_arrays("model", lambda a: a.update({"fc2.bias": a["fc2.bias"][:64]}))
    ),
    "slots inf": arrays(
        "finite numbers",
        "nan or inf in 'fc1.bias/momentum'",
        with_arrays("optimizer", lambda a: a.update({"fc1.bias/momentum": np.full(128, np.inf, np.float32)})),
    ),
    "no slots": arrays("optimizer/fc1.weight/momentum", "none", with_arrays("optimizer", dict.clear)),
    "other samples": arrays("1000 training samples", "1437", of_other_data),
    "TensorFlow, weights int64": arrays("model/fc1.weight in float32", "int64", cast(np.int64), program=TENSORFLOW),
}
MISTAKES = MANIFEST | FILES | OTHER_RUNS | ARRAYS


@pytest.mark.parametrize("name", MISTAKES)
def test_checkpoints(name, tmp_path):
    check(MISTAKES[name], tmp_path)


def test_a_run_goes_on_from_the_same_without_a_change(tmp_path):
    put(tmp_path)
    words = [word.replace("{here}", str(tmp_path)) for word in f"{PYTORCH} {RESUME}".split()]
    result = run(*words)
    assert result.returncode == 0 and result.stdout.count("Epoch = ") == 3, result.output
