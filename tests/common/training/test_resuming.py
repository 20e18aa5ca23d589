"""Settings that a run may be resumed with. Oracle: the flags that define a position and the optimizer's slots."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext
from dataclasses import asdict

import pytest

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import Progress, TrainState
from allstep.common.config.train_config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from allstep.common.files.strict_json import Mismatch
from allstep.common.recipe.schedule import Schedule
from allstep.common.training.resuming import check_flags, check_samples
from allstep.common.training.saved_run import check_run

RUN = TrainConfig(
    data=DataConfig(dataset="synthetic", synthetic_samples=100), optimizer=OptimizerConfig(weight_decay=0.1)
)
FOLDER = dataclasses.replace(RUN, data=DataConfig(dataset="image-folder"))

ADAM = dataclasses.replace(RUN, optimizer=OptimizerConfig(optimizer="adam"))


def saved(run: TrainConfig) -> TrainState:
    """Return the state that a run saves after its first step, of 32 of 100 samples."""
    running = {"loss_sum": 1.0, "learning_rate": 0.1, "epoch_seconds": 1.0, "cumulative_seconds": 0.0}
    running |= {"best_validation_loss": math.inf, "epochs_without_gain": 0}
    running |= {"loss_scale": 2.0**16, "good_steps": 0, "skipped_steps": 1}
    progress = Progress(epoch=0, offset=32, step=1, samples_seen=32, running=running)
    schedule = Schedule(base_lr=0.1, samples_per_epoch=100, num_epochs=10, global_batch_size=32)
    rng = {"seed": run.data.seed}
    return TrainState("pytorch", {}, progress, rng, json.loads(json.dumps(asdict(schedule))), run.flat())


def check(before: TrainConfig, after: TrainConfig, num_samples: int = 100) -> None:
    check_run(saved(before))
    check_flags(after, saved(before))
    check_samples(saved(before), num_samples)


def changed(run: TrainConfig, part: str, **values: object) -> TrainConfig:
    return dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **values)})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (RUN, FOLDER, "expected --dataset synthetic, .*received image-folder"),
        (RUN, changed(RUN, "data", seed=1), "expected --seed 0, .*received 1"),
        (RUN, dataclasses.replace(RUN, model="mlp"), "expected --model cnn, .*received mlp"),
        (
            RUN,
            changed(RUN, "data", synthetic_shape=(8, 8, 3)),
            "expected --synthetic-shape 28 28 1, .*received 8 8 3",
        ),
        (RUN, changed(RUN, "data", synthetic_classes=3), "expected --synthetic-classes 10, .*received 3"),
        (FOLDER, changed(FOLDER, "data", image_size=64), "expected --image-size 224, .*received 64"),
        (
            FOLDER,
            changed(FOLDER, "data", exif_orientation=True),
            "expected --exif-orientation False, .*received True",
        ),
        (
            changed(RUN, "data", dataset="npz:a.npz"),
            changed(RUN, "data", dataset="npz:a.npz", task="regression"),
            "expected --task auto, .*received regression",
        ),
        (RUN, changed(RUN, "optimizer", optimizer="nesterov"), "expected --optimizer sgd, .*received nesterov"),
        (RUN, changed(RUN, "optimizer", momentum=0.0), "expected --momentum above 0, .* received 0"),
        (changed(RUN, "optimizer", momentum=0.0), RUN, "expected --momentum 0, .* received 0.9"),
        (
            ADAM,
            changed(ADAM, "optimizer", optimizer="adamw"),
            "--optimizer adam,",
        ),
    ],
)
def test_what_means_something_else_is_refused_by_name(before, after, expected):
    with pytest.raises(UserError, match=expected) as error:
        check(before, after)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_older_than_a_flag_has_its_default():
    state = saved(FOLDER)
    del state.config["exif-orientation"]
    check_flags(FOLDER, state)
    with pytest.raises(UserError, match="expected --exif-orientation False"):
        check_flags(changed(FOLDER, "data", exif_orientation=True), state)


def test_another_number_of_samples():
    with pytest.raises(UserError, match="expected 100 training samples .*received 99"):
        check(RUN, RUN, num_samples=99)


@pytest.mark.parametrize(
    "after",
    [
        RUN,
        changed(RUN, "data", image_size=64),  # another data set
        changed(RUN, "optimizer", momentum=0.5, weight_decay=0.0),
        dataclasses.replace(RUN, schedule=ScheduleConfig(base_lr=0.5, epochs=9)),
    ],
)
def test_what_is_the_users_to_change(after):
    check(RUN, after)


def test_fewer_epochs_than_it_has_begun():
    with pytest.raises(UserError, match="expected --epochs to be at least 5, .*received 4"):
        state = saved(RUN)
        progress = dataclasses.replace(state.progress, epoch=4)
        check_flags(changed(RUN, "schedule", epochs=4), dataclasses.replace(state, progress=progress))


# Values that a run never saves, by part of the state and key.
WRONG = {
    "progress": {
        "epoch": [1, 10, 11, 10**30],
        "offset": [0, 31, 33, 101, 10**9],
        "step": [0, 33],
        "samples_seen": [0, 31, 33, 10**18],
    },
    "running": {
        "loss_sum": [math.nan, math.inf, "1", None, True, 10**400],
        "learning_rate": [math.nan, -0.1, [0.1]],
        "epoch_seconds": [0, -1.0, math.inf, 1e300],
        "cumulative_seconds": [-1.0, math.nan, "0"],
        "loss_scale": [0, 3.0, -2.0, math.inf, 2.0**200, 2.0**-20, "1"],
        "good_steps": [-1, 2000, 0.5],
        "skipped_steps": [-1, 2, 10**9],
        "best_validation_loss": [math.nan, None],
        "epochs_without_gain": [-1, 1, 0.5, math.inf],
    },
    "rng": {"seed": [1, "0", 0.0, None, 10**30]},
    "schedule": {
        "base_lr": [0, -1, "0.1", math.inf, math.nan],
        "samples_per_epoch": [0, 99.0, "100", 31, 10**30],
        "num_epochs": [0, -1, True],
        "global_batch_size": [0, 10**18, "32", 32.0, None],
        "reference_batch_size": [0, "256"],
        "scaling": ["cubic", None, 1],
        "warmup_epochs": [-1, 11, "1"],
        "decay": ["none", []],
        "milestones": [["1"], [2, 1], 1],
        "step_factor": [0, 2, None],
        "power": [0, "2"],
        "final_lr": [-1, 10],
        "batch_ramp": [[1], [[1]], [[1, 0]], [[2, 2], [1, 2]], [[0, 2.5]], {}, [[0, 10**9]]],
    },
    "config": {
        "dataset": [1, "syn\n", None],
        "synthetic-shape": [[8, 8], "8 8 1", [8, 8, "1"], [0, 8, 1]],
        "synthetic-classes": [0, "10"],
        "model": ["mlp2", None, ["cnn"]],
        "optimizer": ["lion", 7],
        "seed": ["0", 0.5, None],
    },
}
CASES = [(part, key, value) for part, keys in WRONG.items() for key, values in keys.items() for value in values]
CASES += [(part, key, ...) for part, keys in WRONG.items() for key in keys if part != "progress"]


@pytest.mark.parametrize(("part", "key", "value"), CASES)
def test_what_no_run_saves_is_refused(part, key, value):
    """Oracle: the state from `Saver.save` passes; each other one differs in one field, which is missing (...) or has
    another value."""
    state = saved(RUN)
    check_run(state)
    if part == "progress":
        state = dataclasses.replace(state, progress=dataclasses.replace(state.progress, **{key: value}))
    elif value is ...:
        del (state.progress.running if part == "running" else getattr(state, part))[key]
    else:
        (state.progress.running if part == "running" else getattr(state, part))[key] = value
    with pytest.raises(Mismatch, match="expected .* received .*") as error:
        check_run(state)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("ramp", "is_real"),
    [
        ([[1, 2], [2, 4]], True),
        ([[1, 10**9]], False),
        ([[1, 2], [2, 4], [3, 8], [4, 16], [5, 32]], False),
        ([[1, 2], [9, 4]], False),
        ([[0.5, 2]], False),
    ],
)
def test_batches_that_follow_the_noise_double(ramp, is_real):
    state = saved(changed(RUN, "schedule", batch_ramp=("auto",)))
    state = dataclasses.replace(state, progress=dataclasses.replace(state.progress, epoch=5, step=20, samples_seen=532))
    state.schedule["batch_ramp"] = ramp
    with nullcontext() if is_real else pytest.raises(Mismatch, match="expected batches that double up to 16 times"):
        check_run(state)


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ("npz:/a/x.npz", "npz:x.npz", True),
        ("parquet:a", "parquet:b", True),
        ("a.py:load", "b/c.py:load", True),
        ("npz:x.npz", "parquet:x", False),
        ("text:a.txt", "text", False),
        ("digits", "mnist", False),
    ],
)
def test_data_may_have_moved_if_its_digests_are_known(before, after, moves):
    """`same_on_ranks` compares the data itself."""
    old, new = (dataclasses.replace(RUN, data=DataConfig(dataset=name)) for name in (before, after))
    with pytest.raises(UserError, match="expected --dataset"):  # a checkpoint of an older version
        check(old, new)
    state = dataclasses.replace(saved(old), data={"training labels": "00"})
    if moves:
        check_flags(new, state)
    else:
        with pytest.raises(UserError, match="expected --dataset"):
            check_flags(new, state)
