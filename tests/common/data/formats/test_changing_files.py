"""Files of data that change while a run trains on them. Oracle: what was read before, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest
from written_formats import WRITERS, opened

from allstep.common.base.errors import UserError


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("size", [0, 1])
def test_files_that_change_during_training_are_refused_and_mapped_ones_may_go(kind, images, size, tmp_path):
    (tmp_path / "set").mkdir()
    WRITERS[kind](tmp_path / "set" / "train", slice(None), images=images)
    dataset = opened(f"{kind}:{tmp_path}/set", tmp_path / "cache")
    train, first = dataset.train, np.arange(3)
    before, _ = train.read(first, epoch=0)
    folder = "cache/derived" if kind == "parquet" else "set"
    [path] = (tmp_path / folder).glob("*.arrow" if kind in ("parquet", "hf") else "*")
    content = path.read_bytes()
    path.rename(tmp_path / "moved")
    if kind in ("parquet", "hf"):
        path.write_bytes(b"other")
        np.testing.assert_array_equal(train.read(first, epoch=0)[0], before)
    else:
        with pytest.raises(UserError, match=f"{path}.*No such file"):
            train.read(first, epoch=0)
    (tmp_path / "moved").rename(path)
    path.write_bytes(content[: len(content) * size])
    with pytest.raises(UserError, match=f"{path} has changed during training; start again"):
        train.read(first, epoch=0)
