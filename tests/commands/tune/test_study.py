"""Searches on one study: at the same time, and resumed. Oracle: the trials of one undisturbed search."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import optuna
import pytest

from allstep.commands.tune.study import next_trial, open_study

SPACE = {"base-lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)}


def draw(path: Path, num_trials: int, *, seed: int = 0) -> list[float]:
    """Add trials until the study has `num_trials`, and return what all of them tried."""
    study = open_study(path, metric="accuracy")
    while True:
        with next_trial(study, path, SPACE, num_trials, seed=seed) as (trial, _):
            if trial is None:
                return [one.params["base-lr"] for one in study.trials]
            study.tell(trial, 0.5)


def test_a_resumed_search_draws_what_an_undisturbed_one_draws(tmp_path):
    path, parts = tmp_path / "whole.journal", [draw(tmp_path / "parts.journal", count) for count in (2, 4, 6)]
    whole = draw(path, 6)
    assert len(set(whole)) == 6 and parts[-1] == whole
    assert not set(draw(tmp_path / "other.journal", 6, seed=1)) & set(whole)


def a_search(path: Path, barrier) -> None:
    barrier.wait()
    draw(path, 6)


@pytest.mark.parametrize("name", ["study.journal", "study.db"])
def test_three_searches_at_once_on_a_new_study(name, tmp_path):
    """Oracle: one search alone."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    searches = [context.Process(target=a_search, args=(tmp_path / name, barrier)) for _ in range(3)]
    for search in searches:
        search.start()
    for search in searches:
        search.join()
    assert [search.exitcode for search in searches] == [0, 0, 0]
    assert draw(tmp_path / name, 6) == draw(tmp_path / "alone.journal", 6)
