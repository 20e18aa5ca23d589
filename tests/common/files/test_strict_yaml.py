"""Untrusted YAML. Oracle: PyYAML's own safe loader, for harmless text."""

from __future__ import annotations

import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.files import strict_yaml

BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", ["[1, 2.5, x, null]", "a: {b: [c]}", "- [fc, 100, 1.0, 2]", "", "2026-01-01"])
def test_as_the_safe_loader(text, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert strict_yaml.load(path, maximum=1000) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "line 2: the alias"),
        ("a: &a [*a]", "alias"),
        ("[" * 5000, "nested too deeply"),
        ("!!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("a: [", "line 1"),
        ("a: 1\nb: {c: 2,\n c: 3}", "line 3: c twice"),
        ("\x00", "special characters"),
        (f"a: {'9' * 6000}", "digits"),
        ("x" * 2000, "at most 1000 bytes"),
    ],
)
def test_what_it_refuses(text, reason, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises((OSError, ValueError), match=reason):
        strict_yaml.load(path, maximum=1000 if len(text) == 2000 else 10**5)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.yaml")
    with pytest.raises(OSError, match="received a FIFO"):
        strict_yaml.load(tmp_path / "x.yaml", maximum=1000)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.text(alphabet="&*[]{}:,-!|>#'\"ab1 \n", max_size=60))
def test_any_text_ends(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(text)
    try:
        strict_yaml.load(path, maximum=1000)
    except ValueError as error:
        assert str(error)
