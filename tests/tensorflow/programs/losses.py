"""Losses of a user as objects of both frameworks."""

from functools import partial

import keras
import tensorflow as tf
import torch
from torch import nn
from torch.nn import functional


def scaled(outputs, targets, *, factor):
    return (outputs - targets) ** 2 * factor


def compares_pytorch(outputs, targets):
    return functional.cross_entropy(outputs - outputs.mean(0), targets)


def compares_tensorflow(outputs, targets):
    return keras.losses.sparse_categorical_crossentropy(targets, outputs - tf.reduce_mean(outputs, 0), from_logits=True)


def fails(outputs, targets):
    raise ValueError("too few samples")


weighted = torch.tensor([1.0, 2.0, 3.0])
partial_pytorch = partial_tensorflow = partial(scaled, factor=2.0)
module_pytorch, module_tensorflow = nn.MSELoss(), keras.losses.MeanSquaredError()
kind_pytorch, kind_tensorflow = nn.MSELoss, keras.losses.MeanSquaredError
each_pytorch, each_tensorflow = nn.MSELoss(reduction="none"), keras.losses.mean_squared_error
function_pytorch, function_tensorflow = functional.huber_loss, keras.losses.huber
sum_pytorch, sum_tensorflow = nn.MSELoss(reduction="sum"), keras.losses.MeanSquaredError(reduction="sum")
sum_partial = partial(functional.mse_loss, reduction="sum")
weights = nn.CrossEntropyLoss(weight=weighted)
weights_partial = partial(functional.cross_entropy, weight=weighted)
weights_each = nn.CrossEntropyLoss(weight=weighted, reduction="none")
ignored = nn.CrossEntropyLoss(ignore_index=1)
probabilities = nn.BCELoss()
sum_of_probabilities = nn.BCELoss(reduction="sum")
learned = nn.Sequential(nn.Linear(2, 1))
asymmetric_pytorch = functional.kl_div
asymmetric_tensorflow = keras.losses.KLDivergence()
