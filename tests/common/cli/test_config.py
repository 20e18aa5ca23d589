"""Flags, the YAML file and their precedence. Oracle: the documented contract of each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import REPOSITORY

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import Parser
from allstep.common.cli.command_line import parse, parse_beside
from allstep.common.cli.validation import validate_for_data
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import DataConfig, load
from allstep.common.launch.placement import ALONE

STRATEGIES = ("horovod", "single")
RANK_1 = replace(ALONE, launcher="mpirun", rank=1, world_size=2)


def parsed(*argv: str, placement=ALONE) -> TrainConfig:
    return parse(STRATEGIES, placement, argv)


def file_with(tmp_path: Path, **content: object) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_flags_of_the_trainers_stand_before_and_behind_words_of_a_command():
    parser = Parser("allstep test", None)
    parser.add_argument("run")
    parser.add_argument("--ema", action="store_true")
    for words in (
        "--epochs 1 RUN --ema", "RUN --ema --epochs 1", "--epochs=1 --ema RUN", "--metrics f1 mae --ema RUN",
        "--synthetic-shape 8 8 1 RUN --ema", "--compile RUN --ema", "--no-drop-last --config FILE RUN --ema",
        "--epochs 1 --ema -- RUN",
    ):  # fmt: skip
        flags, given = parse_beside(parser, words.split())
        assert (flags.run, flags.ema) == ("RUN", True), words
        assert sorted([*given, "RUN", "--ema"]) == sorted(words.replace(" -- ", " ").split()), words
    with pytest.raises(UserError, match="expected run, received nothing for it"):
        parse_beside(parser, ["--metrics", "f1", "RUN"])  # which may be a metric
    with pytest.raises(UserError, match="received --epochz; did you mean --epochs"):
        parse_beside(parser, ["--epochz", "1", "RUN"])


def test_without_flags():
    config = parsed()
    assert (config.strategy, config.model, config.schedule.epochs) == ("single", "cnn", 10)
    assert config.data.dataset == "digits"
    assert config.output.output_dir is None


def test_strategy_follows_the_launcher_unless_given():
    assert parsed(placement=RANK_1).strategy == "horovod"
    assert parsed("--strategy", "single", placement=RANK_1).strategy == "single"


@pytest.mark.parametrize("spelling", [("--config", "{}"), ("--config={}",)])
@pytest.mark.parametrize("flag_first", [True, False])
def test_flags_win_over_the_file_wherever_they_stand(spelling, flag_first, tmp_path):
    path = file_with(tmp_path, epochs=3, base_lr=0.25, optimizer="adam", tensorboard=True, output_dir=str(tmp_path))
    named, flags = [part.format(path) for part in spelling], ["--epochs", "5", "--no-tensorboard"]
    config = parsed(*(flags + named if flag_first else named + flags))
    assert (config.schedule.epochs, config.output.tensorboard) == (5, False)  # from the flags
    assert (config.schedule.base_lr, config.optimizer.optimizer, config.output.output_dir) == (0.25, "adam", tmp_path)
    assert config.optimizer.momentum == 0.9  # the default


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


FLAGS = ["list-strategies", *TrainConfig().flat()]
NAMES = st.sampled_from(FLAGS)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=5) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(SCALARS, inner), max_leaves=5)
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def a_run_or_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        parsed("--config", str(path))
    except UserError as error:
        assert str(error).isprintable() and "expected " in str(error) and ", received " in str(error)


@FUZZ
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_text_is_a_run_or_one_line(content, tmp_path):
    a_run_or_one_line(tmp_path / "run.yaml", content)


@FUZZ
@given(text=st.text(st.sampled_from("[]{}:-?,&*!|>'\"#%@`\n\t ~<=epochs123."), max_size=200))
def test_any_text_of_yamls_signs_is_a_run_or_one_line(text, tmp_path):
    a_run_or_one_line(tmp_path / "run.yaml", f"epochs: 3\n{text}".encode())


@FUZZ
@given(content=st.dictionaries(NAMES | SCALARS, VALUES, max_size=4))
def test_any_structure_is_a_run_or_one_line(content, tmp_path):
    a_run_or_one_line(tmp_path / "run.yaml", yaml.dump(content).encode())


@FUZZ
@given(st.lists(NAMES.map("--{}".format) | st.text() | st.integers().map(str) | st.floats().map(str), max_size=5))
def test_any_command_line_is_a_run_or_one_line(argv):
    try:
        parsed(*(word for word in argv if word not in ("-h", "--help", "--output-dir", "--timeline")))
    except UserError as error:
        assert str(error).isprintable() and "expected " in str(error) and ", received " in str(error)


def test_a_value_in_a_file_is_no_flag(tmp_path):
    """Neither do YAML 1.1's conversions apply: 010 is ten, 5:2 is no time of day, and no is a word."""
    assert (
        parsed("--config", file_with(tmp_path, resume="--help", output_dir="--tensorboard")).output.resume == "--help"
    )
    (tmp_path / "run.yaml").write_text("epochs: 010\nbatch_ramp: [5:2, 8:4]\nresume: no\ndrop_last: yes\n")
    config = parsed("--config", str(tmp_path / "run.yaml"))
    assert (config.schedule.epochs, config.schedule.batch_ramp) == (10, ("5:2", "8:4"))
    assert (config.output.resume, config.schedule.drop_last) == ("no", True)


def test_flags_may_be_spelt_as_keys():
    assert parsed("--base_lr", "0.5", "--data_dir=/a_b").schedule.base_lr == 0.5
    assert str(parsed("--data_dir=/a_b").data.data_dir) == "/a_b"


def test_negative_and_special_numbers_are_values():
    for word in ("-1e3", "-.5", "-inf", "-nan"):
        with pytest.raises(UserError, match=f"--base-lr to be .*, received {word};"):
            parsed("--base-lr", word)


def test_each_flag_has_its_help(capsys):
    """Oracle: the fields of the configuration; the strategies are the framework's."""
    with pytest.raises(SystemExit):
        parsed("--help")
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in FLAGS)
    assert "--strategy {horovod,single}" in printed and "{None}" not in printed


def test_help_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit):
        parsed("--help")
    assert capsys.readouterr().out.startswith("usage: ")


def test_help_where_the_default_folder_has_a_percent_sign(monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/100%d")
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "/100%d" in capsys.readouterr().out


def test_a_user_without_a_home_is_one_line(monkeypatch):
    """Oracle: Python's own error for a user without an entry in /etc/passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(UserError, match="^expected HOME or XDG_CACHE_HOME .*, received neither; "):
        parsed()


def test_help_comes_from_rank_0_alone(capsys):
    for placement, lines in ((ALONE, True), (RANK_1, False)):
        with pytest.raises(SystemExit) as end:
            parsed("--help", placement=placement)
        assert end.value.code == 0
        assert ("--base-lr" in capsys.readouterr().out) == lines


def test_help_into_a_reader_that_has_gone():
    command = f"set -o pipefail; {sys.executable} pytorch/train.py --help | true"
    result = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (141, "")


def test_global_batch():
    assert parsed().global_batch_size(4) == 32 * 4
    assert parsed("--batch-size", "5").global_batch_size(4) == 20
    assert parsed("--global-batch-size", "5").global_batch_size(4) == 5


def test_samples_that_are_known_ahead_are_those_of_the_data():
    parsed("--global-batch-size", str(len(load(DataConfig()).train)))
    with pytest.raises(UserError, match="at most all 1437 training samples, received 1438"):
        parsed("--global-batch-size", str(len(load(DataConfig()).train) + 1))


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


@pytest.mark.parametrize(
    ("flags", "dataset"),
    [
        ("--task regression", "digits"),
        ("--task classification", "image-folder"),
        ("--text-tokens bytes", "text"),
        ("--exif-orientation", "synthetic"),
        ("--validation-share 0.2", "digits"),
        ("--image-size 64", "cifar10"),
        ("--input-fields x", "mnist"),
    ],
)
def test_flags_that_a_data_set_would_ignore(flags, dataset):
    with pytest.raises(UserError, match=f"{flags.split()[0]} has no effect on --dataset {dataset}; leave it out"):
        parsed("--dataset", dataset, *flags.split())


def test_a_plateau_has_its_flags_alone():
    with pytest.raises(UserError, match="--plateau-patience needs --lr-decay plateau, received cosine; leave it out"):
        parsed("--lr-decay", "cosine", "--plateau-patience", "3")


def test_resume_and_init_from_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="received both"):
        parsed("--output-dir", str(tmp_path), "--resume", "latest", "--init-from", str(tmp_path))
    parsed("--output-dir", str(tmp_path), "--resume", "auto", "--init-from", str(tmp_path))
    with pytest.raises(UserError, match="expected --output-dir with --resume auto"):
        parsed("--resume", "auto")
