"""A run directory is data: code that its flags name is imported only if the user names it too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allstep.commands.bisect import command, replay
from allstep.common.base.errors import UserError
from allstep.common.catalog.user_file import trusted
from allstep.common.config.train_config import TrainConfig
from allstep.common.exact.trace import FOLDER, Header, Recorder, read


def a_run(
    output_dir: Path, learning_rate: float, world_size: int = 1, framework: str = "pytorch", **config: object
) -> Path:
    """Write the trace of a step."""
    for rank in range(world_size):
        header = Header(
            rank=rank, world_size=world_size, local_size=world_size, framework=framework, launcher="mpirun", host="h",
            processor="p", device="cpu", num_threads=1, versions={}, config={**TrainConfig().flat(), **config},
            slices=None, activations=("a",), parameters=("w",),
        )  # fmt: skip
        recorder = Recorder(output_dir / FOLDER, header, 0)
        row = np.ones((), header.row_type)
        row["learning_rate"] = np.float64(learning_rate).view(np.int64)
        recorder.write(row)
    return output_dir


@pytest.fixture
def evil(tmp_path) -> Path:
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return file


@pytest.mark.parametrize("flag", ["model", "dataset", "loss"])
def test_code_of_a_run_is_not_imported(flag, evil, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"{evil}:build", "evil.py:build"
    runs = [a_run(tmp_path / str(number), number, **{flag: word}) for number, word in enumerate(words, 1)]
    with pytest.raises(SystemExit) as end:
        command.main([*map(str, runs), f"--{flag}", "other.py:build", f"--{flag}", "evil.py:load"])
    assert end.value.code == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{run}: not replayed: the --{flag} of the run is code, which runs only if you name it too: add --{flag} {word}"
        for run, word in zip(runs, words, strict=True)
    ]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"framework": "commands.cli"}, "its framework is"),
        ({"world_size": 300}, "it had 300 ranks, and this host runs"),
    ],
)
def test_headers_are_checked(header, reason, tmp_path):
    output_dir = a_run(tmp_path, 0.1, **header)
    with pytest.raises(UserError, match=reason):
        replay.replay(output_dir, read(output_dir).first, 1)


def test_code_is_trusted_by_file_and_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path}/net.py:build"
    assert trusted("cnn", []) == "cnn" and trusted(["net.py:build"], []) == "['net.py:build']"
    assert trusted(here, []) is None and trusted(here, ["net.py:other", "other.py:build", "cnn"]) is None
    assert trusted(here, ["net.py:build"]) == here
    assert trusted("/elsewhere/net.py:build", ["net.py:build"]) == "net.py:build"  # the user's file
