"""allstep study. Oracles: a learning rate near zero does not train; made-up numbers counted manually."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from ranks import environment, run

from allstep.commands.report import command as report
from allstep.commands.shared.records import files
from allstep.commands.study.description import STUDIES, SUMMARY, Description, StudyResult, StudyRun, read_description
from allstep.commands.study.running import variants
from allstep.commands.study.section import curve, judge, spread, study
from allstep.common.base.errors import UserError
from allstep.common.files.strict_json import from_json, to_json

CLAIM = {
    "says": "The rate of next to nothing is worse.",
    "measure": "validation_accuracy",
    "of": ["none"],
    "against": "some",
    "worse_by": 0.3,
}
TINY = {
    "title": "Two rates",
    "question": "Does a rate of next to nothing train?",
    "expectation": "It does not.",
    "source": "Robbins and Monro 1951",
    "flags": {"model": "mlp", "epochs": 1},
    "series": {"some": {"base-lr": 0.05}, "none": {"base-lr": 1e-7}},
    "figures": [{"y": "validation_accuracy"}, {"y": "train_loss", "x": "epoch"}],
    "claims": [CLAIM],
    "seeds": 2,
}


def file_of(folder: Path, **changes: object) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
    return path


def test_a_study_that_is_killed_goes_on_and_ends_in_figures_and_a_page(tmp_path):
    out = tmp_path / "out"
    command = ["allstep", "study", str(file_of(tmp_path)), "--output-dir", str(out), "--at-once", "1"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 240
        while not (out / SUMMARY).exists() or not files.read(StudyResult, out / SUMMARY).runs:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    places = [out / "runs" / f"{name}-seed-{seed}" for name in ("some", "none") for seed in range(2)]
    for place in places:
        partial = place / "checkpoints" / ".tmp-step-00000045"  # as a kill within a save or a removal leaves it
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "model.safetensors").write_bytes(b"")
        (place / "checkpoints" / "notes.txt").write_text("mine")
    (out / f".{SUMMARY}.host.partial").write_text('{"format": "allstep-stu')  # left by the kill
    kept = files.read(StudyResult, out / SUMMARY).runs
    result = run(*command, timeout=500)
    assert result.returncode == 0, result.output
    ended = files.read(StudyResult, out / SUMMARY)
    assert ended.finished and ended.runs[: len(kept)] == kept
    assert len([line for line in result.stdout.splitlines() if " of 4: " in line]) == 4 - len(kept)
    [verdict] = judge(ended)
    assert verdict.came_out and verdict.value < -0.3
    assert "It came out as expected: 1 of 1 claims hold." in result.stdout
    page = (out / "study.md").read_text()
    assert "Two rates" in page and "![validation accuracy](figure-1.svg)" in page
    assert (out / "figure-2.svg").read_text().startswith("<?xml") and (out / "figure-2.png").stat().st_size > 5000
    assert not list(out.rglob("model.safetensors"))
    assert len(list(out.rglob("notes.txt"))) == len(places)  # files of the user stay
    report.main([str(out)])
    reported = (out / "report.html").read_text()
    assert "Two rates" in reported and "Training runs" not in reported  # the runs are in the study's section


def result_of(values: dict[str, list[float | None]], **changes: object) -> StudyResult:
    """Return a study whose runs ended with these values by variant; None stands for a run that diverged."""
    described = from_json(Description, {**TINY, **changes}, "the study")
    runs = [
        StudyRun(
            variant=variant,
            seed=seed,
            diverged=value is None,
            seconds=1.0,
            points=(dict.fromkeys(("epoch", "train_loss", "validation_accuracy"), 0.7 if value is None else value),),
        )
        for variant, own in values.items()
        for seed, value in enumerate(own)
    ]
    names = dict.fromkeys(values, ("python",))
    about = {"command": "allstep study tiny", "created": "now", "updated": "now", "num_cores": 2, "name": "tiny"}
    return StudyResult(description=described, variants=names, seeds=2, runs=tuple(runs), **about)


@pytest.mark.parametrize(
    ("relation", "of", "came_out"),
    [
        ({"worse_by": 0.3}, [0.6, 0.6], True),
        ({"worse_by": 0.3}, [0.7, 0.7], False),
        ({"within": 0.3}, [0.7, 0.7], True),
        ({"within": 0.3}, [0.6, 0.6], False),
        ({"within": 0.3}, [1.0, 1.0], True),
        ({"better_by": 0.05}, [1.0, 1.0], True),
        ({"better_by": 0.15}, [1.0, 1.0], False),
        ({"times": 1.08}, [1.0, 1.0], True),
        ({"times": 1.2}, [1.0, 1.0], False),
        ({"within": 0.3, "measure": "train_loss"}, [0.1, 0.1], True),
        ({"better_by": 0.1, "measure": "train_loss"}, [1.1, 1.1], False),
    ],
)
def test_claims_are_judged_by_means(relation, of, came_out):
    claim = {name: value for name, value in CLAIM.items() if name != "worse_by"} | relation
    [verdict] = judge(result_of({"some": [0.91, 0.93], "none": of}, claims=[claim]))
    assert verdict.came_out is came_out


def test_one_of_several_variants_suffices():
    claim = {**CLAIM, "of": ["none", "more"], "worse_by": None, "within": 0.01}
    [verdict] = judge(result_of({"some": [0.9, 0.9], "none": [0.1, 0.2], "more": [0.9, 0.9]}, claims=[claim]))
    assert verdict.came_out and verdict.of.variant == "more"


def test_runs_that_diverged_count_as_the_study_says_or_are_left_out():
    values = {"some": [0.9, 0.8], "none": [0.5, None]}
    counted = result_of(values, diverged_counts_as={"validation_accuracy": 0.1})
    one = spread(counted, "none", "validation_accuracy")
    assert (one.mean, one.deviation, one.num_runs) == (
        pytest.approx(0.3),
        pytest.approx(statistics.stdev([0.5, 0.1])),
        2,
    )
    assert spread(result_of(values), "none", "validation_accuracy").mean == 0.5
    assert curve(counted, "none", "epoch", "validation_accuracy")[1][0].mean == 0.5
    section = study(counted)
    assert section.tables[1].rows[1][1:] == ["30.0% ± 28.3%", "2", "1"]
    assert study(result_of(values)).tables[1].rows[1][1] == "50.0%"  # a single run has no deviation


def test_a_claim_about_what_nobody_measured_is_not_known():
    result = result_of({"some": [0.9, 0.9], "none": [0.1, 0.1]}, claims=[{**CLAIM, "measure": "nothing"}])
    assert judge(result)[0].came_out is None and "NOT KNOWN" in study(result).items[0]
    times = {**{key: value for key, value in CLAIM.items() if key != "worse_by"}, "times": 2.0}
    result = result_of({"some": [0.0, 0.0], "none": [0.1, 0.1]}, claims=[{**times, "measure": "validation_accuracy"}])
    assert judge(result)[0].came_out is None  # nothing is a number of times 0


@pytest.mark.parametrize("name", STUDIES)
def test_studies_that_come_with_allstep_can_be_run(name):
    _, described = read_description(name)
    matrix = variants(described, None, ())
    assert described.seeds >= 5 and len({one.name for one in matrix}) == len(matrix)
    assert from_json(Description, json.loads(json.dumps(to_json(described))), name) == described


def test_flags_of_the_user_take_the_place_of_the_study_s_own():
    _, described = read_description("batch-size")
    words = variants(described, "tensorflow", ("--model", "wide-resnet"))[-1].command(3, Path("DIR"), landscape=False)
    assert words[2] == "allstep.tensorflow.train" and words[-4:] == ["--seed", "3", "--output-dir", "DIR"]
    assert max(i for i, word in enumerate(words) if word == "wide-resnet") > words.index("cnn")


@pytest.mark.parametrize(
    ("changes", "flags", "expected"),
    [
        ({"titel": "x"}, (), "received titel (did you mean title?)"),
        ({"series": {"some": {"base-rl": 1}}}, (), "received base-rl (did you mean base-lr?)"),
        ({"claims": [{**CLAIM, "against": "sone"}]}, (), "received sone (did you mean some?)"),
        ({"claims": [{**CLAIM, "within": 0.1}]}, (), "received 2"),
        ({"x": {"label": "x", "flag": "epochs", "values": [{}]}}, (), "numbers or words"),
        ({"flags": {"seed": 1}}, (), "expected flags of the trainers in flags, received seed"),
        ({"flags": {"ranks": "two"}}, (), "expected ranks to be a whole number"),
        ({"title": None}, (), "expected the study.title to be"),
        ({"series": {}}, (), "expected the study.series to name one or more"),
        ({"series": {False: {}}}, (), "expected keys that are text, received False"),
        ({"claims": []}, (), "expected the study.claims to have 1 to"),
        ({"flags": {"ranks": 2, "slow-rank": 2}}, (), "expected slow-rank to be a whole number from 0 to 1"),
        ({}, ("--base-lr", "1"), "received --base-lr, which this study gives"),
        ({}, ("--seed", "1"), "received --seed"),
        ({}, ("--epoch", "1"), "did you mean --epochs?"),
        ({"flags": {"epochs": 1}}, ("--warmup-epochs", "2"), "some, with the study's flags and yours: expected --warm"),
    ],
)
def test_mistakes(changes, flags, expected, tmp_path):
    with pytest.raises(UserError) as caught:
        variants(read_description(str(file_of(tmp_path, **changes)))[1], None, flags)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"format": "allstep-stu', "expected a readable allstep-study file"),
        ('{"format": "allstep-compare", "version": 2}', "expected allstep-study 1"),
        (None, "expected the study tiny with the flags with which"),
    ],
)
def test_results_of_something_else_are_left_alone(text, expected, tmp_path):
    other = result_of({"some": [0.9], "none": [0.1]})
    text = json.dumps({"format": "allstep-study", "version": 1, **to_json(other)}) if text is None else text
    (tmp_path / SUMMARY).write_text(text)
    result = run("allstep", "study", file_of(tmp_path), "--output-dir", tmp_path)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1), result.output
    assert expected in result.stderr and (tmp_path / SUMMARY).read_text() == text


def test_more_seeds_go_on_with_what_is_there(tmp_path):
    from allstep.commands.study.running import begin

    name, described = read_description(str(file_of(tmp_path)))
    matrix = variants(described, None, ())
    first = begin(tmp_path, name, described, matrix, seeds=2, command="allstep study tiny")
    done = StudyRun(variant="some", seed=1, diverged=False, seconds=1.0, points=())
    files.write(tmp_path / SUMMARY, dataclasses.replace(first, runs=(done,)))
    again = begin(tmp_path, name, described, matrix, seeds=5, command="allstep study tiny")
    assert (again.seeds, again.runs) == (5, (done,))
    assert begin(tmp_path, name, described, matrix, seeds=1, command="allstep study tiny").runs == ()
