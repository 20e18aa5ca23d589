"""text and text-topics: passages of the Python Language Reference, as `help()` shows it; no download.

The text is part of Python (module pydoc_data) and depends on its version. A token is a character, a passage has 64. In
`text` the target of a token is the next token; in `text-topics` the target of a passage is its chapter.

text:FILE is like `text` with the text of a file, in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. If it has
characters beyond those of the built-in text, the vocabulary is that of its training part, and one token more stands for
all characters that occur in the validation part alone. With --text-tokens bytes a token is a byte of any file.

Source: The Python Language Reference, Python Software Foundation, PSF License 2.
"""

import codecs
import importlib
import re
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset, Task
from allstep.common.data.passed_over import tell
from allstep.common.files.disk import read_regular

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Vocabulary of the built-in text, in which all other characters become question marks, and of files of it alone."""
LENGTH = 64
NUM_TOPICS = 10
MAX_CHARACTERS, MAX_OF_A_TOPIC = 2**17, 2**14
"""Length of `text` and of each chapter of `text-topics`; small transformers take seconds per epoch on one core."""
MAX_BYTES = 2**28
"""Maximum size of a file: each character takes eight bytes of memory, twice."""
VALIDATION_EVERY = 10
_MARKS = {  # longest first: UTF-32's mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_PACKED = re.compile(rb"\x1f\x8b|BZh\d1AY&SY|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04")  # gzip, bzip2, xz, zstd, zip
_MAX_LOOKED_AT = 2**16


def prepare(config: DataConfig) -> None:
    """Check that this Python includes its documentation, unless the text is a file."""
    if config.path is None:
        _topics()


def load(config: DataConfig) -> Dataset:
    """Cut the text into passages; every tenth is for validation, the others for training.

    Raises UserError if this Python does not include its documentation, or a file is too short for training.
    """
    if config.kind == "text":
        tokens, num_tokens, vocabulary = _tokens(config)
        inputs, targets = passages(tokens[:-1]), passages(tokens[1:])
        sizes = {"num_classes": num_tokens, "num_tokens": num_tokens}
        return _dataset(inputs, targets, **sizes, task="next-token", vocabulary=vocabulary)
    topics = _topics()
    longest = sorted(set(topics.values()), key=lambda text: (-len(text), text))[:NUM_TOPICS]
    chapters = [passages(encode(text[:MAX_OF_A_TOPIC])) for text in longest]
    labels = np.repeat(np.arange(NUM_TOPICS), [len(chapter) for chapter in chapters])
    return _dataset(
        np.concatenate(chapters), labels, num_classes=NUM_TOPICS, num_tokens=len(CHARACTERS), task="classification",
        vocabulary=CHARACTERS,
    )  # fmt: skip


def _tokens(config: DataConfig) -> tuple[np.ndarray, int, str]:
    """Return the tokens of the text, int64 (characters,), the size of the vocabulary, and its characters."""
    if config.path is None:
        topics = _topics()
        text = "\n".join(topics[name] for name in sorted(topics))
        return encode(text[: MAX_CHARACTERS + 1]), len(CHARACTERS), CHARACTERS
    data = read_regular(config.path, maximum=MAX_BYTES)
    if config.text_tokens == "bytes":
        tokens, num_tokens, vocabulary = np.frombuffer(data, np.uint8).astype(np.int64), 256, ""
    else:
        tokens, num_tokens, vocabulary = _characters(_decoded(data, config.path), config.dataset)
    if len(tokens) < VALIDATION_EVERY * LENGTH + 1:
        raise UserError(
            f"expected at least {VALIDATION_EVERY * LENGTH + 1} {config.text_tokens} in {config.path}, received "
            f"{len(tokens)}; name a longer text"
        )
    return tokens, num_tokens, vocabulary


def _decoded(data: bytes, path: Path) -> str:
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    if _PACKED.match(data):
        raise UserError(f"expected text in {path}, received a compressed file; unpack it")
    if encoding == "utf-8" and (at := data.find(0)) >= 0:
        parities = {index % 2 for index, byte in enumerate(data[:_MAX_LOOKED_AT]) if not byte}
        of_utf_16 = ", as UTF-16 without a byte order mark has; convert it (iconv -f UTF-16 -t UTF-8)"
        cause = of_utf_16 if len(parities) == 1 else ", which no text has; name another file"
        raise UserError(f"expected text in {path}, received a zero byte at {at}{cause}, or give --text-tokens bytes")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected text in UTF-8, or in UTF-16 with a byte order mark, in {path}, received byte "
            f"0x{data[error.start]:02x} at {error.start}; convert it (iconv -t UTF-8), or give --text-tokens bytes"
        ) from error


def _characters(text: str, where: str) -> tuple[np.ndarray, int, str]:
    """Return the tokens of a text, and the size and characters of the vocabulary of its training part."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    if not np.setdiff1d(codes, [ord(character) for character in CHARACTERS]).size:
        return encode(text), len(CHARACTERS), CHARACTERS
    positions = np.arange((len(codes) - 1) // LENGTH * LENGTH + 1)  # the rest fills no passage
    # A character is a target in the passage of the one before it.
    trained = _trains(positions // LENGTH) | _trains(np.maximum(positions - 1, 0) // LENGTH)
    known = np.unique(codes[positions][trained])
    tokens = np.searchsorted(known, codes).astype(np.int64)
    unknown = known[np.minimum(tokens, len(known) - 1)] != codes
    tokens[unknown] = len(known)
    if (count := unknown[positions].sum()) > 0:
        example = quote(text[int(unknown.argmax())])
        tell(f"{where}: {count} characters occur in the validation part alone (such as {example}), and have one token")
    return tokens, len(known) + 1, known.tobytes().decode("utf-32-le", "surrogatepass")


def _trains(passage: np.ndarray) -> np.ndarray:
    """Return whether passages of these numbers are for training; every tenth is for validation."""
    return passage % VALIDATION_EVERY != VALIDATION_EVERY - 1


def encode(text: str) -> np.ndarray:
    """Return the tokens of a text, int64 (characters,)."""
    token_of = np.full(256, CHARACTERS.index("?"), np.int64)
    token_of[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    return token_of[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def passages(tokens: np.ndarray) -> np.ndarray:
    """Cut the tokens into rows of LENGTH, and drop the rest."""
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def _dataset(
    inputs: np.ndarray, targets: np.ndarray, *, num_classes: int, num_tokens: int, task: Task, vocabulary: str
) -> Dataset:
    trains = _trains(np.arange(len(inputs)))
    return Dataset(
        train=ArraySplit(inputs[trains], targets[trains]),
        validation=ArraySplit(inputs[~trains], targets[~trains]),
        input_shape=(LENGTH,),
        num_classes=num_classes,
        input_type="int64",
        num_tokens=num_tokens,
        task=task,
        vocabulary=vocabulary,
    )


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "expected a Python that comes with its documentation (pydoc_data) for the text, received one without; use "
            "another Python, or another data set"
        ) from None
