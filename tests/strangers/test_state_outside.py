"""State that a network's code keeps outside of it, in globals, classes and functions. Oracle: torch's own loop."""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from stranger_networks import BATCH, EPOCHS, RATE, Base, X, Y, assert_same_state, expected, train_twice

from allstep.common.base.errors import UserError
from allstep.pytorch import Session
from allstep.pytorch.kept.outside import outside_state

number, numbers, generator, iterator = 0, list[int](), np.random.default_rng(5), itertools.count()


class Global(Base):
    """A network that scales by a number that grows; subclasses have it elsewhere."""

    def next(self) -> float:
        global number
        number += 1
        return number

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 0.1 * self.next()) if self.training else hidden


class InAList(Global):
    def next(self) -> float:
        numbers.append(1)
        return len(numbers)


class Drawn(Global):
    def next(self) -> float:
        return generator.random()


class OfTheClass(Global):
    number = 0

    def next(self) -> float:
        type(self).number += 1
        return self.number


class ByDefault(Global):
    def next(self, kept=[0]) -> float:  # noqa: B006
        kept[0] += 1
        return kept[0]


class Closures(Global):
    def more(self) -> None:
        def counter():
            count = 0

            def following() -> float:
                nonlocal count
                count += 1
                return count

            return following

        self.first, self.second = counter(), counter()

    def next(self) -> float:
        return self.first() + 0.1 * self.second()


class Iterator(Global):
    def next(self) -> float:
        return next(iterator)


def begin() -> None:
    """Put back what a process has when it starts."""
    global number, generator, iterator
    number, generator, iterator = 0, np.random.default_rng(5), itertools.count()
    numbers.clear()
    OfTheClass.number, ByDefault.next.__defaults__[0][0] = 0, 0


NAMES = {
    Global: "global.number",
    InAList: "global.numbers",
    Drawn: "global.generator",
    OfTheClass: "OfTheClass.number",
    ByDefault: "ByDefault.next.default",
    Closures: "closure.count",
}


@pytest.mark.parametrize("build", NAMES)
def test_a_trial_leaves_it_as_it_was_and_no_run_resumes_without_it(build, tmp_path):
    begin()
    oracle = expected(build(), "sgd")
    begin()
    Session(found := build(), (X, Y), (X, Y), epochs=EPOCHS, base_lr=RATE, global_batch_size=BATCH).fit()
    assert_same_state(found, oracle)
    with pytest.raises(UserError, match=f"computes with {NAMES[build]}, which it changes in training and checkpoints"):
        train_twice(build, tmp_path)


def test_what_nothing_can_look_into_is_told(tmp_path, capfd):
    with pytest.raises(UserError, match="computes with something that its code alone can reach, which it changes"):
        train_twice(Iterator, tmp_path)
    assert "something that its code alone can reach in training, which checkpoints lack" in capfd.readouterr().err


class Lazy(OrderedDict):
    """A mapping as Transformers has: it imports what is asked for, and some of that fails."""

    def items(self):
        raise ImportError("one of the models is not installed")


lazy = Lazy(network=1)


class Library(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * lazy["network"]


class Frozen(OrderedDict):
    """A mapping as diffusers has for options: its methods refuse changes."""

    def refuse(self, *_args, **_values):
        raise TypeError("a frozen mapping")

    update = setdefault = pop = clear = __setitem__ = __delitem__ = refuse


class Options(Base):
    def more(self) -> None:
        self.options, self.scale = Frozen(), ScaledBy([1.0])
        OrderedDict.__setitem__(self.options, "scale", 0.5)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.options["scale"] * self.scale[0]


class ScaledBy(list):
    """A list that changes what it is given."""

    def extend(self, values):
        super().extend(2 * one for one in values)


def test_containers_of_a_class_are_put_back_as_they_were():
    oracle = expected(Options(), "sgd")
    Session(found := Options(), (X, Y), (X, Y), epochs=EPOCHS, base_lr=RATE, global_batch_size=BATCH).fit()
    assert_same_state(found, oracle)
    assert found.options == {"scale": 0.5} and found.scale == [1.0]


def test_mappings_that_compute_what_they_hold_are_not_read():
    oracle = expected(Library(), "sgd")
    Session(found := Library(), (X, Y), (X, Y), epochs=EPOCHS, base_lr=RATE, global_batch_size=BATCH).fit()
    assert_same_state(found, oracle)


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages", "venv/lib/python3.12/site-packages"])
def test_state_of_packages_is_not_a_networks(folder, tmp_path, monkeypatch):
    """A venv may use packages of another environment, and PyTorch's variables reach Python's built-in functions."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "library_of_layers.py").write_text(
        "import torch\nBUILTINS = __builtins__\n"
        "class Layer(torch.nn.Module):\n    def forward(self, x):\n        return BUILTINS['max'](x, -x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    layer = importlib.import_module("library_of_layers").Layer
    assert not list(outside_state(torch.nn.Sequential(layer())))


def test_pytorch_is_not_a_networks_wherever_it_is(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.linear, "__file__", "/home/user/pytorch/torch/nn/modules/linear.py")
    assert not list(outside_state(torch.nn.Linear(1, 1)))
