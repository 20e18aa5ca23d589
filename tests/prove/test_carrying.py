"""Whether a reduction carries the results of validation. Oracle: the flow of values in small scripts."""

from __future__ import annotations

import pytest

from allstep.commands.prove.checks.carrying import carries

_PLAIN = """
for x, y in loader:
    total += model(x).sum()
{}
"""
_HELPER = """
def validate(model, loader):
    for x, y in loader:
        guesses = model(x).argmax(1)
        {update}
    return metric.compute(), total

def main():
    loss_sum = train()
    accuracy, _ = validate(model, loader)
    {after}

main()
"""


def _lines(text: str, *parts: str) -> tuple[str, ...]:
    """Return the lines of some parts of the text, as `script.py:NUMBER`."""
    return tuple(f"script.py:{text[: text.index(part)].count(chr(10)) + 1}" for part in parts)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("reduced(total)", True),
        ("reduced(train_loss)", False),
        ("mean = total / 3\nreduced([mean])", True),
        ("total = train_loss\nreduced(total)", False),
    ],
)
def test_a_reduction_after_a_loop(after, expected, tmp_path):
    text = _PLAIN.format(after)
    (tmp_path / "script.py").write_text(text)
    assert carries(tmp_path / "script.py", _lines(text, "model(x)"), _lines(text, "reduced(")) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [("model(x.to(0))", True), ("self.model(x)", True), ("print(model(x).sum())", False), ("_ = model(x)", False)],
)
def test_results_that_a_model_keeps_itself(call, expected, tmp_path):
    text = f"for x in loader:\n    {call}\nreduced(counts)\n"
    (tmp_path / "script.py").write_text(text)
    assert carries(tmp_path / "script.py", _lines(text, "model(x"), _lines(text, "reduced(")) == expected


@pytest.mark.parametrize(
    ("update", "after", "expected"),
    [
        ("total = guesses", "reduced(accuracy)", True),
        ("total = guesses", "reduced(loss_sum)", False),
        ("metric.update(guesses, y)", "reduced(accuracy)", True),
        ("guesses = reduced(guesses)", "pass", True),
        ("total += (guesses == y).sum()\n        reduced(y)", "pass", False),
    ],
)
def test_a_reduction_around_a_function(update, after, expected, tmp_path):
    text = _HELPER.format(update=update, after=after)
    (tmp_path / "script.py").write_text(text)
    source = (*_lines(text, "model(x)", "accuracy, _ = "), f"script.py:{text.count(chr(10))}")
    inside = "reduced(" in update
    sink = (*_lines(text, "reduced("), *(source[1:] if inside else source[2:]))
    assert carries(tmp_path / "script.py", source, sink) == expected


_METER = """
class Meter:
    def update(self, value):
        self.sum += value

    def reduce(self):
        self.sum = reduced(self.sum)

class Trainer:
    def __init__(self):
        self.top1 = Meter()

    def validate(self, model, loader):
        for x, y in loader:
            self.top1.update(model(x).item())  # in a method

    def __call__(self, model, loader):
        for x, y in loader:
            self.top1.update(model(x).item())  # in an object

def validate(model, loader, meters):
    for x, y in loader:
        accuracy = (model(x) == y).mean()  # in a function
        meters["top1"].update(accuracy.item())

def outputs(model, loader):
    for x, y in loader:
        yield model(x), y  # in a generator

def main():
    trainer, others = Trainer(), Meter()
    for epoch in range(3):
        meter = Meter()
        def run(loader):
            for x, y in loader:
                meter.update(model(x).item())  # in a closure
        {call}
        {after}

main()
"""


_GENERATOR = "for out, y in outputs(model, loader):\n            others.update(out)"


@pytest.mark.parametrize(
    ("place", "call", "after", "expected"),
    [
        ("in a closure", "run(loader)", "meter.reduce()", True),
        ("in a closure", "run(loader)", "others.reduce()", False),
        ("in a function", "validate(model, loader, meters)", "meters.reduce()", True),
        ("in a function", "validate(model, loader, meters)", "others.reduce()", False),
        ("in a method", "trainer.validate(model, loader)", "trainer.reduce()", True),
        ("in a method", "trainer.validate(model, loader)", "others.reduce()", False),
        ("in an object", "trainer(model, loader)", "trainer.reduce()", True),
        ("in a generator", _GENERATOR, "others.reduce()", True),
        ("in a generator", _GENERATOR, "meter.reduce()", False),
    ],
)
def test_an_object_that_takes_results_and_reduces_them(place, call, after, expected, tmp_path):
    text = _METER.format(call=call, after=after)
    (tmp_path / "script.py").write_text(text)
    end = f"script.py:{text.count(chr(10))}"
    sink = (*_lines(text, "reduced(self", f"    {after}"), end)
    assert carries(tmp_path / "script.py", (*_lines(text, place, f"    {call}"), end), sink) == expected


def test_a_library_that_validates_by_itself_is_not_judged(tmp_path):
    (tmp_path / "script.py").write_text("trainer.fit(model)\n")
    assert carries(tmp_path / "script.py", ("script.py:1",), ("script.py:1",))
    assert carries(None, ("script.py:1",), ("script.py:2",))
