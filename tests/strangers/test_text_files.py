"""Texts as other people have them: in any encoding of Unicode, as bytes, or refused in one line.

Oracle: Python's own decoder.
"""

from __future__ import annotations

import bz2
import gzip
import lzma

import numpy as np
import pytest
from other_data import opened

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset

POEM = "天地玄黃 宇宙洪荒\n日月盈昃 辰宿列張\n" * 60
ENCODINGS = {"utf-8": "utf-8", "utf-8 with a mark": "utf-8-sig", "utf-16": "utf-16", "utf-32": "utf-32"}


def characters(dataset: Dataset) -> list[str]:
    """Return the texts of passages, decoded by the vocabulary of the training part."""
    known = sorted({*POEM})
    read = [split.read(np.arange(len(split)), epoch=0)[0] for split in (dataset.train, dataset.validation)]
    return ["".join(known[token] for token in row) for row in np.concatenate(read)]


@pytest.mark.parametrize("kind", ENCODINGS)
def test_text_in_any_encoding_of_unicode(kind, tmp_path, capfd):
    (tmp_path / "poem.txt").write_bytes(POEM.encode(ENCODINGS[kind]))
    dataset = opened(f"text:{tmp_path}/poem.txt", tmp_path)
    assert dataset.num_classes == dataset.num_tokens == len({*POEM}) + 1
    passages = [POEM[start : start + 64] for start in range(0, len(POEM) - 64, 64)]
    assert characters(dataset) == [*(p for n, p in enumerate(passages) if n % 10 != 9), *passages[9::10]]
    assert capfd.readouterr().err == ""


def test_big_endian_text_and_characters_of_the_validation_part_alone(tmp_path, capfd):
    text = POEM[: 9 * 64 + 5] + "龍é" + POEM[9 * 64 + 7 :]
    (tmp_path / "a.txt").write_bytes(b"\xfe\xff" + text.encode("utf-16-be"))
    dataset = opened(f"text:{tmp_path}/a.txt", tmp_path)
    inputs, _ = dataset.validation.read(np.array([0]), epoch=0)
    assert inputs[0, 5:7].tolist() == [len({*POEM})] * 2 and dataset.num_tokens == len({*POEM}) + 1
    line = f"text:{tmp_path}/a.txt: 2 characters occur in the validation part alone (such as 龍), and have one token"
    assert line in capfd.readouterr().err


def test_text_in_other_encodings_is_refused_or_read_as_bytes(tmp_path):
    data = ("né à Orléans, " * 80).encode("latin-1")
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match="expected text in UTF-8, .* byte 0xe9 at 1; convert it .*--text-tokens"):
        opened(f"text:{tmp_path}/a.txt", tmp_path)
    (tmp_path / "b.txt").write_bytes(("We are here. " * 80).encode("utf-16-le"))
    with pytest.raises(UserError, match="received a zero byte at 1, as UTF-16 without a byte order mark has; convert"):
        opened(f"text:{tmp_path}/b.txt", tmp_path)
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        (tmp_path / "b.txt").write_bytes(pack(POEM.encode()))
        with pytest.raises(UserError, match="received a compressed file; unpack it"):
            opened(f"text:{tmp_path}/b.txt", tmp_path)
    (tmp_path / "b.txt").write_bytes(bytes(1000))
    with pytest.raises(UserError, match="received a zero byte at 0, which no text has; name another file"):
        opened(f"text:{tmp_path}/b.txt", tmp_path)
    dataset = opened(f"text:{tmp_path}/a.txt", tmp_path, text_tokens="bytes")
    assert dataset.num_tokens == 256
    assert bytes(dataset.train.read(np.array([0]), epoch=0)[0][0].tolist()) == data[:64]
