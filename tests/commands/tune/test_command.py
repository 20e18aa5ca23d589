"""allstep tune. Oracle: only one of the candidate learning rates trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import optuna
import pytest
import yaml
from ranks import full, run

from allstep.commands.report import command as report
from allstep.commands.shared.jobs import environment
from allstep.commands.tune import command as tune
from allstep.commands.tune.space import corners, read_space
from allstep.commands.tune.study import open_study
from allstep.common.api.session import words_of
from allstep.common.cli.command_line import parse
from allstep.common.files.strict_yaml import load
from allstep.common.launch.placement import ALONE

BEST = 0.05
SPACE = {"base-lr": [1e-6, BEST, 1e-5, 3e-6], "momentum": {"low": 0.0, "high": 0.1}}
TRIALS = ("--trials", "6", "--model", "mlp", "--epochs", "2")


def space(folder: Path, content: object = SPACE) -> Path:
    path = folder / "space.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def finished(study: Path) -> int:
    if not study.exists():
        return 0
    return sum(trial.state.is_finished() for trial in open_study(study, metric="accuracy").trials)


@pytest.mark.parametrize("name", ["study.journal", full("study.db")])
def test_a_search_that_is_killed_twice_finds_the_best(name, tmp_path):
    study = tmp_path / name
    command = ["allstep", "tune", str(space(tmp_path)), "--study", str(study), *TRIALS]
    for number in (1, 2):
        with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True) as process:
            deadline = time.monotonic() + 240
            while finished(study) < number:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            time.sleep(1.0)  # into the next trial
            os.kill(process.pid, signal.SIGKILL)
    result = run(*command, timeout=500)
    assert result.returncode == 0, result.output
    assert "of a killed search will be tried again" in result.stderr
    assert load(tmp_path / "study.best.yaml", maximum=1000)["base-lr"] == BEST
    trials = open_study(study, metric="accuracy").trials
    ended_well = [trial for trial in trials if trial.state != optuna.trial.TrialState.FAIL]
    assert len(ended_well) == 6 and all(trial.state.is_finished() for trial in trials)
    assert not list(tmp_path.glob("*.trial-*.lock"))
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert all(caption in page for caption in ("Optimization history", "Parameter importances", "Slices"))


def test_all_ranks_stop_where_a_trial_is_pruned(tmp_path):
    study = open_study(tmp_path / "study.journal", metric="accuracy")
    low = optuna.distributions.FloatDistribution(1e-9, 1e-6)
    for _ in range(5):  # the pruner uses the median after five trials
        better = optuna.trial.create_trial(
            params={"base-lr": 1e-6}, distributions={"base-lr": low}, value=0.99, intermediate_values={1: 0.99}
        )
        study.add_trial(better)
    command = ("allstep", "tune", space(tmp_path, {"base-lr": {"low": 1e-9, "high": 1e-6}}), "--model", "mlp")
    launched = ("--study", tmp_path / "study.journal", "--trials", "6", "--epochs", "3", "--launch", "horovodrun -np 2")
    result = run(*map(str, (*command, *launched)), timeout=300)
    assert result.returncode == 0 and "trial 5: pruned" in result.stdout, result.output
    assert list(study.trials[5].intermediate_values) == [1]


def test_what_diverges_does_not_end_the_search(tmp_path):
    command = ("allstep", "tune", str(space(tmp_path, {"base-lr": [1e30]})), "--study", str(tmp_path / "study.journal"))
    result = run(*command, "--trials", "1", "--model", "mlp", "--epochs", "1", timeout=300)
    assert result.returncode == 2 and "trial 0: diverged" in result.stdout, result.output
    assert "expected a trial that trained to its end" in result.stderr


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ({"base-rl": [1]}, (), "received base-rl; did you mean base-lr?"),
        ({"base-lr": {"low": 1, "high": 0}}, (), "expected base-lr in"),
        ("base-lr: {low: 1e-4, high: 1.0}", (), "write 1.0e-4, not 1e-4"),
        ({"base-lr": {"low": -1.0, "high": 1.0}}, (), "expected --base-lr to be"),
        ("", (), "expected lines of `flag: what to try`"),
        ("a: &x [1]\nb: *x", (), "the alias *x"),
        (SPACE, ("--epoch", "2"), "did you mean --epochs?"),
        ({"base-lr": [1]}, ("--base-lr=2",), "expected --base-lr as a flag or in"),
        (SPACE, ("--study", "/proc/study"), "name another --study"),
    ],
)
def test_mistakes(content, flags, expected, tmp_path):
    arguments = ("--study", str(tmp_path / "study"), *flags)
    result = run("allstep", "tune", str(space(tmp_path, content)), *arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("allstep: error: ") and expected in line


def test_whole_numbers_bound_an_interval_of_fractions(tmp_path):
    found = read_space(space(tmp_path, {"ema": {"low": 0, "high": 1}, "epochs": {"low": 1, "high": 3}}))
    assert [type(one).__name__ for one in found.values()] == ["FloatDistribution", "IntDistribution"]


def test_the_space_that_the_description_shows_can_be_searched(tmp_path):
    quote = "\n".join(re.findall(r"^    ([a-z-]+: .+)$", str(tune.__doc__), re.MULTILINE))
    for values in corners(read_space(space(tmp_path, quote))):
        parse(("single",), ALONE, words_of(values))


def test_a_file_that_is_no_study(tmp_path):
    (tmp_path / "study.db").write_text("A text of more than a few characters, and no database at all." * 10)
    result = run("allstep", "tune", str(space(tmp_path)), "--study", str(tmp_path / "study.db"))
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.output
