"""text and text-topics: passages of the Python Language Reference, as `help()` shows it; no download.

The text is part of Python (module pydoc_data) and depends on its version. A token is a character, a passage has 64. In
`text` the target of a token is the next token; in `text-topics` the target of a passage is its chapter. text:FILE is
like `text` with the text of a file.

Source: The Python Language Reference, Python Software Foundation, PSF License 2.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset, Task
from allstep.common.files.regular_file import read_regular

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Vocabulary: a token is the index of its character; all other characters become question marks."""
LENGTH = 64
NUM_TOPICS = 10
MAX_CHARACTERS, MAX_OF_A_TOPIC = 2**17, 2**14
"""Length of `text` and of each chapter of `text-topics`; small transformers take seconds per epoch on one core."""
MAX_BYTES = 2**28
"""Maximum size of a file: each character takes eight bytes of memory, twice."""
VALIDATION_EVERY = 10


def prepare(config: DataConfig) -> None:
    """Check that this Python includes its documentation, unless the text is a file."""
    if config.path is None:
        _topics()


def load(config: DataConfig) -> Dataset:
    """Cut the text into passages; every tenth is for validation, the others for training.

    Raises:
        UserError: this Python does not include its documentation, or a file is too short for training.
    """
    if config.kind == "text":
        tokens = encode(_text(config.path))
        inputs, targets = passages(tokens[:-1]), passages(tokens[1:])
        if len(inputs) < VALIDATION_EVERY:
            raise UserError(
                f"expected at least {VALIDATION_EVERY * LENGTH + 1} characters in {config.path}, received "
                f"{len(tokens)}; name a longer text"
            )
        return _dataset(inputs, targets, num_classes=len(CHARACTERS), task="next-token")
    topics = _topics()
    longest = sorted(set(topics.values()), key=lambda text: (-len(text), text))[:NUM_TOPICS]
    chapters = [passages(encode(text[:MAX_OF_A_TOPIC])) for text in longest]
    labels = np.repeat(np.arange(NUM_TOPICS), [len(chapter) for chapter in chapters])
    return _dataset(np.concatenate(chapters), labels, num_classes=NUM_TOPICS, task="classification")


def _text(path: Path | None) -> str:
    if path:
        return read_regular(path, maximum=MAX_BYTES).decode(errors="replace")
    topics = _topics()
    return "\n".join(topics[name] for name in sorted(topics))[: MAX_CHARACTERS + 1]


def encode(text: str) -> np.ndarray:
    """Return the tokens of a text, int64 (characters,)."""
    token_of = np.full(256, CHARACTERS.index("?"), np.int64)
    token_of[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    return token_of[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def passages(tokens: np.ndarray) -> np.ndarray:
    """Cut the tokens into rows of LENGTH, and drop the rest."""
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def _dataset(inputs: np.ndarray, targets: np.ndarray, *, num_classes: int, task: Task) -> Dataset:
    validates = np.arange(len(inputs)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return Dataset(
        train=ArraySplit(inputs[~validates], targets[~validates]),
        validation=ArraySplit(inputs[validates], targets[validates]),
        input_shape=(LENGTH,),
        num_classes=num_classes,
        input_type="int64",
        num_tokens=len(CHARACTERS),
        task=task,
    )


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "expected a Python that comes with its documentation (pydoc_data) for the text, received one without; use "
            "another Python, or another data set"
        ) from None
