"""Flags, the YAML file and which of them wins. Oracle: what the contract says of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from allstep.common.command_line import parse
from allstep.common.config import TrainConfig
from allstep.common.errors import UserError
from allstep.common.launcher import ALONE
from allstep.common.validation import validate_for_data

STRATEGIES = ("horovod", "single")
RANK_1 = replace(ALONE, launcher="mpirun", rank=1, world_size=2)


def parsed(*argv: str, place=ALONE) -> TrainConfig:
    return parse(STRATEGIES, place, argv)


def file_with(tmp_path: Path, **content: object) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_without_flags():
    config = parsed()
    assert (config.strategy, config.model, config.schedule.epochs) == ("single", "cnn", 10)
    assert config.data.dataset == "digits"
    assert config.output.output_dir is None


def test_strategy_follows_the_launcher_unless_given():
    assert parsed(place=RANK_1).strategy == "horovod"
    assert parsed("--strategy", "single", place=RANK_1).strategy == "single"


@pytest.mark.parametrize("spelling", [("--config", "{}"), ("--config={}",)])
@pytest.mark.parametrize("flag_first", [True, False])
def test_flags_win_over_the_file_wherever_they_stand(spelling, flag_first, tmp_path):
    path = file_with(tmp_path, epochs=3, base_lr=0.25, optimizer="adam", tensorboard=True, output_dir=str(tmp_path))
    named, flags = [part.format(path) for part in spelling], ["--epochs", "5", "--no-tensorboard"]
    config = parsed(*(flags + named if flag_first else named + flags))
    assert (config.schedule.epochs, config.output.tensorboard) == (5, False)  # the flags'
    assert (config.schedule.base_lr, config.optimizer.optimizer, config.output.output_dir) == (0.25, "adam", tmp_path)
    assert config.optimizer.momentum == 0.9  # neither's


def test_a_batch_size_flag_replaces_the_files_of_either_kind(tmp_path):
    path = file_with(tmp_path, global_batch_size=100, epochs=3)
    schedule = parsed("--config", path, "--batch-size", "7").schedule
    assert (schedule.batch_size, schedule.global_batch_size, schedule.epochs) == (7, None, 3)


def test_keys_with_hyphens_lists_and_nothing(tmp_path):
    path = file_with(tmp_path, **{"synthetic-shape": [9, 7, 3], "warmup-epochs": 1, "batch_size": None})
    config = parsed("--config", path)
    assert config.data.synthetic_shape == (9, 7, 3)
    assert (config.schedule.warmup_epochs, config.schedule.batch_size) == (1.0, None)


def test_a_later_file_wins_over_an_earlier_one(tmp_path):
    (tmp_path / "a").mkdir()
    first, second = file_with(tmp_path / "a", epochs=1, seed=7), file_with(tmp_path, epochs=2)
    config = parsed("--config", first, "--config", second)
    assert (config.schedule.epochs, config.data.seed) == (2, 7)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--dataset", "synthetic", "--synthetic-shape", "9", "7", "3", "--global-batch-size", "60"),
        ("--optimizer", "adamw", "--weight-decay", "0.01", "--warmup-epochs", "0.5", "--lr-decay", "cosine"),
        ("--output-dir", "/tmp/a b", "--tensorboard", "--log-every", "7", "--init-from", "/tmp/c"),
    ],
)
def test_the_resolved_file_gives_the_same_run(flags, tmp_path):
    """config.yaml is `flat()` of the run that wrote it."""
    config = parsed(*flags)
    assert parsed("--config", file_with(tmp_path, **config.flat())) == config


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- epochs", "received a list"),
        ("epochs: [1, 2", "readable YAML"),
        ("\x00", "readable YAML"),
        ("", "received nothing"),
        ("epochs: soon", "soon"),
        ("epoch: 3", "did you mean epochs?"),
    ],
)
def test_a_wrong_file_is_one_line(content, expected, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        parsed("--config", str(path))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("argv", [("--config",), ("--config", "/nonexistent"), ("--config", "/"), ("--config=",)])
def test_no_file(argv):
    with pytest.raises(UserError, match="^expected .*--config.*, received "):
        parsed(*argv)


def test_help_comes_from_rank_0_alone(capsys):
    for place, lines in ((ALONE, True), (RANK_1, False)):
        with pytest.raises(SystemExit) as end:
            parsed("--help", place=place)
        assert end.value.code == 0
        assert ("--base-lr" in capsys.readouterr().out) == lines


def test_global_batch():
    assert parsed().global_batch_size(4) == 32 * 4
    assert parsed("--batch-size", "5").global_batch_size(4) == 20
    assert parsed("--global-batch-size", "5").global_batch_size(4) == 5


def test_ranks_without_samples_are_refused():
    validate_for_data(parsed("--global-batch-size", "3"), num_samples=3, world_size=3)
    with pytest.raises(UserError, match="3 samples of digits for 4 ranks"):
        validate_for_data(parsed(), num_samples=3, world_size=4)
    with pytest.raises(UserError, match="at least the number of ranks, 4, received 3"):
        validate_for_data(parsed("--global-batch-size", "3"), num_samples=100, world_size=4)


@pytest.mark.parametrize("flag", ["--log-every 1", "--tensorboard", "--checkpoint-every 1"])
def test_what_needs_an_output_directory(flag):
    with pytest.raises(UserError, match=f"--output-dir with {flag.split()[0]}"):
        parsed(*flag.split())


def test_resume_and_init_from_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="received both"):
        parsed("--output-dir", str(tmp_path), "--resume", "latest", "--init-from", str(tmp_path))
