"""What a run may be resumed with. Oracle: the flags that say what a position and the optimizer's slots mean."""

from __future__ import annotations

import dataclasses

import pytest

from allstep.common.checkpoint import Progress, TrainState
from allstep.common.config import DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from allstep.common.errors import UserError
from allstep.common.saving import check_same_data

RUN = TrainConfig(
    data=DataConfig(dataset="synthetic", synthetic_samples=100), optimizer=OptimizerConfig(weight_decay=0.1)
)
FOLDER = dataclasses.replace(RUN, data=DataConfig(dataset="image-folder"))

ADAM = dataclasses.replace(RUN, optimizer=OptimizerConfig(optimizer="adam"))


def check(before: TrainConfig, after: TrainConfig, num_samples: int = 100) -> None:
    progress = Progress(epoch=0, offset=32, step=1, samples_seen=32)
    state = TrainState("pytorch", {}, progress, schedule={"samples_per_epoch": 100}, config=before.flat())
    check_same_data(after.flat(), state, num_samples)


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
        (RUN, changed(RUN, "optimizer", optimizer="nesterov"), "expected --optimizer sgd, .*received nesterov"),
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


def test_another_number_of_samples():
    with pytest.raises(UserError, match="expected 100 training samples .*received 99"):
        check(RUN, RUN, num_samples=99)


@pytest.mark.parametrize(
    "after",
    [
        RUN,
        changed(RUN, "data", image_size=64),  # of another data set
        changed(RUN, "optimizer", momentum=0.5, weight_decay=0.0),
        dataclasses.replace(RUN, schedule=ScheduleConfig(base_lr=0.5, epochs=9)),
    ],
)
def test_what_is_the_users_to_change(after):
    check(RUN, after)
