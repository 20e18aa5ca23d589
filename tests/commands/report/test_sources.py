"""Reading directories for a report: broken and foreign files are named, and the rest is used."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from reported import EPOCHS, START

from allstep.commands.report import command as report
from allstep.commands.report import other_sections
from allstep.commands.report.sources import RecordedRun, redact
from allstep.commands.shared.records.runs import Start
from allstep.common.base.errors import UserError


def test_bad_input_is_named_and_the_rest_goes_on(results, capsys):
    other = results / "other"
    other.mkdir()
    (other / "half.json").write_text('{"format": "allstep-compare", "ver')
    (other / "compare.json").write_text(json.dumps({"format": "allstep-compare", "version": 99}))
    (other / "hollow.json").write_text(json.dumps({"format": "allstep-collectives", "version": 2}))
    figure = {"what": "a", "ours": "many", "reference": 1, "ratio": 1, "target": "", "reached": True}
    benchmark = {"format": "allstep-benchmark", "version": 1, "figures": [figure], "samples": {}}
    (other / "words.json").write_text(json.dumps(benchmark))
    (results / "empty").mkdir()
    report.main([str(results), str(results / "empty"), str(results / "nosuch")])
    printed = [line for line in capsys.readouterr().err.splitlines() if "a line is half-written" not in line]
    assert len(printed) == 6
    for words in (
        r"words.json: .*expected result.figures\[0\].ours to be a number .*, received 'many'",
        "compare.json: .*expected allstep-compare 2, received allstep-compare 99",
        "hollow.json: .*expected result to have ranks, received",
        "half.json",
        "empty: no results",
        "nosuch: no such",
    ):
        assert any(re.search(words, line) for line in printed), words
    assert "tensorflow is 34.6% faster than pytorch" in (results / "report.html").read_text()
    with pytest.raises(UserError, match=r"received none \(.*empty: no results of allstep in it\)"):
        report.main([str(results / "empty")])
    assert not capsys.readouterr().err


def test_a_directory_that_cannot_be_listed_is_told(results, monkeypatch, capsys):
    """Root may list any directory, so the error is raised in its place."""
    closed, listed = results / "closed", os.scandir
    closed.mkdir()

    def scandir(path):
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    report.main([str(results)])
    assert f"left out: {closed}: not readable: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "expected"),
    [
        ("horovodrun", 4, "horovodrun -np 4 python"),
        ("mpirun", 2, "mpirun --bind-to none --oversubscribe -np 2 python"),
        ("torchrun", 2, "torchrun --standalone --nproc-per-node 2"),
        ("srun", 8, "srun -n 8 python"),
        (None, 1, "python"),
        ("allstep", 2, "python"),  # one process, which started the others
    ],
)
def test_a_run_is_repeated_by_its_own_launcher(tmp_path, launcher, num_ranks, expected):
    start = Start(num_ranks, 64, "pytorch", "horovod", launcher)
    run = RecordedRun(start, (), None, tmp_path / "a b" / "config.yaml")
    [command] = other_sections.runs([(tmp_path, run)]).commands
    assert command == f"{expected} pytorch/train.py --config '{tmp_path}/a b/config.yaml'"


ILL_TYPED = {
    "epoch": [START, {**EPOCHS[0], "train_loss": "low"}],
    "rate": [START, {**EPOCHS[0], "images_per_second": [1]}],
    "memory": [START, *EPOCHS, {"event": "end", "peak_memory_bytes": "much"}],
    "infinite": [START, {**EPOCHS[0], "cumulative_seconds": 10**400}],
    "ranks": [{**START, "world_size": None}],
    "no-event": [START, 7],
    "no-start": EPOCHS,
}


def test_an_ill_typed_run_does_not_drop_the_others(results, capsys):
    for name, events in ILL_TYPED.items():
        (results / "runs" / name).mkdir()
        (results / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (results / "runs" / "one" / "config.yaml").write_text("{")  # a report does not parse config.yaml
    report.main([str(results)])
    printed = [line for line in capsys.readouterr().err.splitlines() if "half-written" not in line]
    assert len(printed) == len(ILL_TYPED)
    assert all(any(f"runs/{name}/" in line for line in printed) for name in ILL_TYPED)
    written = (results / "report.md").read_text()
    assert "| one | pytorch horovod | 2 | 64 | 3 |" in written and "| epoch |" not in written


def test_a_directory_of_another_program_is_told_in_one_line(results, capsys):
    """A hyperparameter search leaves such a directory: no file is in allstep's format."""
    study = results / "study"
    study.mkdir()
    (study / "study.db").write_bytes(b"SQLite format 3\x00")
    (study / "trials.json").write_text('[{"number": 0, "value": 0.9}]')
    (study / "best.json").write_text('{"format": ["a"], "value": 0.9}')
    report.main([str(results), str(study)])
    printed = [line for line in capsys.readouterr().err.splitlines() if "half-written" not in line]
    assert printed == [f"left out: {study}: no results of allstep in it"]
    assert "tensorflow is 34.6% faster than pytorch" in (results / "report.md").read_text()


def test_secrets():
    given = {
        "url": "https://me:pw@host/x",
        "API_KEY": "abc",
        "command": "run --password=abc --lr 1",
        "loss": 1.0,
        "n": [1],
    }
    hidden = redact(given)
    assert "pw" not in hidden["url"] and "host/x" in hidden["url"]
    assert "abc" not in json.dumps(hidden) and hidden["command"].endswith("--lr 1") and hidden["loss"] == 1.0
