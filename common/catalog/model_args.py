"""--model-args: arguments of the function that builds a network, beside the shape of a sample and the classes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import wrong
from allstep.common.catalog.networks import MODELS


def model_argument(word: str) -> str:
    """Parse a word of --model-args: KEY=VALUE."""
    key, sign, _ = word.partition("=")
    if not sign or not key.isidentifier() or not word.isprintable():
        raise wrong("to be KEY=VALUE", word, "as in drop_rate=0.1")
    return word


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments: numbers, tuples, True, False and None as Python writes them, and anything else as text."""
    return {key: _value(text) for key, _, text in (word.partition("=") for word in words)}


def check_model_args(model: str, words: Sequence[str]) -> None:
    """Refuse arguments for a built-in network, and one that is given twice.

    Raises:
        UserError: the network takes no arguments, or one of them has two values.
    """
    if words and model in MODELS:
        raise UserError(f"--model-args is for networks of libraries or your own, not for --model {model}; leave it out")
    if len(parsed(words)) < len(words):
        raise UserError(f"--model-args has a key twice in {' '.join(words)}; give each key once")


def check_is_function(model: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments for a network that is built already.

    Raises:
        UserError: there are arguments.
    """
    if options:
        raise UserError(f"--model-args needs a function that builds the network, {model} is one already; leave it out")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
