"""The table of networks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import cast

import numpy as np
import pytest

from allstep.common.base.errors import UserError
from allstep.common.catalog.network_outputs import check_outputs
from allstep.common.catalog.networks import MODELS, check_image_size, check_size, model_name
from allstep.common.data.datasets.base import Dataset, Split


def test_the_flag_takes_all_networks():
    assert all(model_name(name) == name for name in MODELS)
    for name in ("timm:resnet18", "keras:ResNet50", "a/my_model.py:build"):
        assert model_name(name) == name
    for name in ("resnet19", "timm:", "my_model.py", "my_model.py:", "my_model.py:a b", "other:resnet18"):
        with pytest.raises(argparse.ArgumentTypeError, match="one of mlp, .*FILE.py:FUNCTION"):
            model_name(name)


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        ("cnn", (6, 5), "6 x 6 pixels or more for --model cnn, received 6 x 5"),
        ("vgg16", (28, 28), "32 x 32 pixels or more for --model vgg16, received 28 x 28"),
        ("vit-tiny", (224, 200), "multiples of 16 pixels for --model vit-tiny, received 224 x 200"),
    ],
)
def test_images_that_do_not_fit_are_refused(model, size, expected):
    with pytest.raises(UserError, match=expected):
        check_image_size(model, *size)


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [("resnet32", (22, 4), "received --model resnet32"), ("wide-resnet", (15, 4), "a multiple of 6 .* received 15")],
)
def test_sizes_that_no_network_has_are_refused(model, size, expected):
    with pytest.raises(UserError, match=expected):
        check_size(model, *size)
    check_size(model, 16, 4)


@pytest.mark.parametrize(
    ("task", "shape", "expected"),
    [
        ("next-token", (2, 6, 9), None),
        ("next-token", (2, 6, 64), None),  # of a vocabulary that is larger than the tokens that occur
        ("next-token", (2, 6, 8), "received .n, 6, 8.; give its last layer as many"),
        ("next-token", (2, 5, 64), "received .n, 5, 64."),
        ("next-token", (2, 64), "received .n, 64."),
        ("classification", (2, 10), None),  # as of ImageNet's classes
        ("classification", (2, 8), "received .n, 8.; give its last layer one output for each class"),
        ("classification", (2, 1), "each class, which count from 0, or --task regression for a loss of numbers"),
        ("regression", (2, 10), "received .n, 10.; give its last layer as many"),
    ],
)
def test_outputs_fit_the_data_set(task, shape, expected):
    none = cast("Split", ())
    dataset = Dataset(none, none, (6,), 9, input_type="int64", num_tokens=9, task=task)
    with pytest.raises(UserError, match=expected) if expected else contextlib.nullcontext():
        check_outputs("my.py:build", np.zeros(shape, np.float32), dataset)
    with pytest.raises(UserError, match="expected outputs .n, 9."):
        weighed = dataclasses.replace(dataset, task="classification", class_weights=(1.0,) * 9)
        check_outputs("my.py:build", np.zeros((2, 10), np.float32), weighed)
