"""Builders of the parts of a training step, the only place where flags select them."""

import keras

from allstep.common.catalog.losses import default_loss
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.tensorflow.inputs import Inputs
from allstep.tensorflow.losses import build_loss
from allstep.tensorflow.observer import GradientSquares, Observer, WeightAverage
from allstep.tensorflow.passes import OnePass, Passes
from allstep.tensorflow.precision import Precision, ScaledFp16
from allstep.tensorflow.recompute import forward_of
from allstep.tensorflow.slices import Slices
from allstep.tensorflow.state import trained_weights
from allstep.tensorflow.step import Change, Clip, Noise, Step
from allstep.tensorflow.strategies.strategy import Strategy


def build_step(
    model: keras.Model,
    optimizer: keras.Optimizer,
    config: TrainConfig,
    strategy: Strategy,
    inputs: Inputs,
    *,
    dataset: Dataset,
    measures_noise: bool,
) -> tuple[Step, OnePass]:
    """Return the training step of a run, and the pass in it.

    `measures_noise` tells whether the gradients of passes are measured for the noise scale.
    """
    flags, reduction, weights = config.optimizer, strategy.reduction, trained_weights(model)
    changes: list[Change] = []
    if flags.clip_norm is not None:
        changes.append(Clip(flags.clip_norm))
    if flags.gradient_noise:
        changes.append(Noise(flags.gradient_noise, weights, config.data.seed))
    observers: list[Observer] = []
    if measures_noise:
        observers.append(GradientSquares(optimizer, strategy.num_local_devices))
    if flags.ema is not None:
        observers.append(WeightAverage(weights, flags.ema, strategy))
    loss = build_loss(config.loss or default_loss(dataset.task), flags.label_smoothing, dataset.class_weights)
    one_pass = OnePass(model, forward_of(model, in_blocks=strategy.flags.recompute), inputs, loss)
    variables = model.trainable_variables
    step = Step(
        optimizer,
        backward=Passes(config.parallel.accumulate_steps, variables, strategy.compiled(one_pass.__call__), observers),
        reduction=reduction,
        precision=ScaledFp16(strategy.unless) if config.precision == "fp16" else Precision(),
        changes=changes,
        observers=observers,
    )
    samples, set_learning_rate = inputs.in_training, step.set_learning_rate
    if reduction.is_ordered:
        slices = Slices(
            model, strategy, samples, observers,
            one_pass=one_pass, apply=step.apply, set_learning_rate=set_learning_rate,
        )  # fmt: skip
        step.start = slices.start
    else:
        step.start = strategy.compile_train_step(step.compute, set_learning_rate, samples)
    return step, one_pass
