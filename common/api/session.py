"""Training from a user's program: conversion of keywords to flags, errors of ranks, and the history of a run.

`pytorch/session.py` and `tensorflow/session.py` define the `Session` that a program creates.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from allstep.common.api.user_parts import Parts
from allstep.common.base.errors import UserError, note
from allstep.common.catalog.user_file import PROGRAM, pass_loss
from allstep.common.config.train_config import OWN_OPTIMIZER, TrainConfig
from allstep.common.launch.placement import apparent_rank, find_placement
from allstep.common.process.environment import restored_environment
from allstep.common.process.exit import run_rank
from allstep.common.reporting.base import Listeners, Reporter
from allstep.common.training.start import start

if TYPE_CHECKING:
    from allstep.common.data.datasets import Dataset
    from allstep.common.training.hooks import Hook
    from allstep.common.training.training_run import TrainingRun

Result = TypeVar("Result")


class BaseSession:
    """A run of the user's own model on the user's own data; `fit` trains. Each framework derives its own."""

    _strategies: Any
    """The framework's package of strategies."""
    _session: Callable[..., TrainingRun | None]
    """Builds a session of configuration, placement, hooks and parts."""
    _flags_of: Callable[[Any], dict[str, Any]]
    """Returns the flags that describe a given optimizer, as far as the run uses them."""

    def __init__(
        self,
        model: Any,
        train: Any,
        validation: Any = None,
        *,
        optimizer: Any = "sgd",
        hooks: Sequence[Hook] = (),
        **flags: Any,
    ) -> None:
        """Keep the model, the data and the flags; `fit` checks them.

        Args:
            model: the network, or a function of the shape of a sample and the number of classes that builds it.
            train: inputs and targets as a pair of arrays (images with channels last) or torch tensors (channels first);
                a map-style data set of torch; an object with `__len__` and `read(indices, epoch)`; or a `Dataset`, with
                both parts.
            validation: the same; or None, if `train` is a pair of these, or to hold out a share of it.
            optimizer: a name of `--optimizer`, or any optimizer of the framework's kind. The first learning rate of its
                groups, or of its optimizers, that is not 0 is the flag base_lr; the others stay in proportion to it.
                Strategies of tf.distribute need a function that builds it, and base_lr.
            hooks: called at the moments of the run.
            flags: of the trainers, as keywords: epochs=5, strategy="ddp", base_lr=0.1, output_dir="runs/a", ...

        Raises:
            UserError: a flag, the data or the optimizer is wrong; `fit` raises it at the latest.
        """
        self._model, self._optimizer, self._hooks = model, optimizer, hooks
        self._samples, self._flags = (train, validation), flags

    def fit(self) -> list[dict[str, Any]]:
        """Train, and return the fields of the event `epoch` of each epoch, the same on every rank.

        A process that only computes for another one, as a worker of parameter-server, ends with the run. A single
        process raises errors. One of several ranks reports its error and exits, so that the job ends.

        Raises:
            UserError: the input is wrong.
            Fault: the run cannot go on.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UserError("fit needs the main thread, which gets signals; call it there")
        return as_rank(self._fit)

    def _fit(self) -> list[dict[str, Any]]:
        own = None if isinstance(self._optimizer, str) else self._optimizer
        flags = {**({"optimizer": self._optimizer} if own is None else self._flags_of(own)), **self._flags}
        if callable(own) and "base_lr" not in flags:
            raise UserError("a function that builds the optimizer needs base_lr, the first learning rate; give it")
        if own is not None and (without_effect := [name for name in _OPTIMIZER_FLAGS if name in self._flags]):
            raise UserError(f"{without_effect[0]} has no effect on an optimizer that is given; set it there")
        _refuse_elastic(flags.get("elastic", False))  # before `start` tells how an elastic job is started
        config, placement = start(self._strategies, as_words(flags))
        _refuse_elastic(config.parallel.elastic)  # a file of flags may ask for it
        training = type(self)._session(config, placement, self._hooks, Parts(self._dataset(config), self._model, own))
        if not training:
            sys.exit()
        return train(training)

    def _dataset(self, config: TrainConfig) -> Dataset:
        from allstep.common.data.datasets import Dataset
        from allstep.common.data.formats.python_file import as_dataset

        first, second = self._samples
        if isinstance(first, Dataset):
            return first
        data = dataclasses.replace(config.data, task=config.data.task_with(config.loss))
        dataset = as_dataset(first, second, data, where="the samples")
        if dataset.input_type == "uint8" and apparent_rank() == 0:
            note(
                "the samples are pixels, which the network gets less their mean and divided by their deviation; give "
                "floating-point numbers for others"
            )
        return dataset


TRIED = ("amsgrad", "centered", "capturable", "differentiable")
"""Options with which an optimizer keeps more state than its canonical slots, or may be unable to step."""
_OPTIMIZER_FLAGS = ("momentum", "weight_decay", "grad_averaging")


def flags_of_optimizer(kind: str, rates: Sequence[float], option: Callable[[str], Any]) -> dict[str, Any]:
    """Return the flags that describe an optimizer, as far as the run uses them.

    Args:
        kind: its name in `--optimizer`, or OWN_OPTIMIZER.
        rates: learning rates of its parts, which stay in proportion to the first that is not 0.
        option: returns an option by its name, or None.
    """
    flags = {"optimizer": OWN_OPTIMIZER, "base_lr": next((rate for rate in rates if rate), 0.0)}
    if kind == OWN_OPTIMIZER or any(map(option, TRIED)) or (kind == "rmsprop" and option("momentum")):
        return flags
    momentum = {"momentum": option("momentum")} if kind == "sgd" else {}
    kind = "nesterov" if option("nesterov") else kind
    return {**flags, "optimizer": kind, "weight_decay": option("weight_decay"), **momentum}


class History(Reporter):
    """Reporter that keeps the events `epoch` of a run, which are the same on every rank."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "epoch":
            self.epochs.append(fields)


def _refuse_elastic(elastic: bool) -> None:
    """Refuse an elastic job, whose ranks would have to run the user's program again."""
    if elastic:
        raise UserError(
            "expected a job of a fixed number of ranks for a Session, received elastic=True; leave it out, or use "
            "the trainer with --model FILE.py:FUNCTION and --dataset FILE.py:FUNCTION"
        )


def train(session: TrainingRun) -> list[dict[str, Any]]:
    """Train, and return the fields of each event `epoch`."""
    history, open_reporter = History(), session.open_reporter
    dataclasses.replace(session, open_reporter=lambda *run: Listeners([open_reporter(*run), history])).train()
    return history.epochs


def as_rank(function: Callable[[], Result]) -> Result:
    """Return the result of a function; if it raises on one of several ranks, end this process and so the job.

    In a job with a single rank, the program can catch the exception.
    """
    if find_placement().world_size == 1:
        with restored_environment():  # of settings that would reach ranks that the program starts later
            return function()
    results: list[Result] = []
    run_rank(lambda: results.append(function()))
    return results[0]


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Return keywords of a Session as the words of a command line, without those that are None."""
    return ["--model", PROGRAM, "--dataset", PROGRAM, *words_of(flags)]


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags by name as the words of a command line, without those that are None."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if name == "loss" and callable(value):
            value = pass_loss(value)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            if isinstance(value, Mapping):
                value = [f"{key}={one}" if isinstance(one, str) else f"{key}={one!r}" for key, one in value.items()]
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words
