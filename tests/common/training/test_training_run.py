"""Resuming, saving and reporting on ranks in threads. Oracle: the undisturbed run, and each flag's words."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy_ranks import Job, of, train
from ranks import events
from undisturbed_runs import NUM_STEPS, SAVING, assert_ended_alike, checkpoint, saved

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import OutputDirectory
from allstep.common.training import resuming
from allstep.common.training.hooks import Check, Hook
from allstep.common.training.worker import StepResult


def stopped(source: Path, output_dir: Path, *, at: int) -> Path:
    """Copy a run as if it had been killed after its last report, with no checkpoint saved after step `at`."""
    shutil.copytree(source, output_dir, dirs_exist_ok=True)
    for step in saved(output_dir):
        if step > at:
            shutil.rmtree(checkpoint(output_dir, step))
    return output_dir


def change_a_byte(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("at", [3, 4, 6])
def test_goes_on_from_any_checkpoint_on_any_number_of_ranks(before, after, at, undisturbed, tmp_path):
    """The checkpoints are of mid-epoch, and of the end of one."""
    source = undisturbed(before)
    train(after, stopped(source, tmp_path, at=at), *SAVING, "--resume", "latest")
    assert_ended_alike(tmp_path, source, exactly=before == after)


@pytest.mark.parametrize(
    "flags",
    [
        ("--slices", 5),
        ("--ema", 0.9),
        ("--precision", "fp16"),
        ("--batch-ramp", "auto", "--global-batch-size", 10),
        ("--lr-decay", "cosine", "--warmup-epochs", 1),
        ("--early-stop-patience", 1),
        ("--lr-decay", "plateau", "--plateau-patience", 1, "--base-lr", 3, "--epochs", 2),
    ],
    ids=lambda flags: flags[0],
)
@pytest.mark.parametrize("at", [3, 6])
def test_goes_on_exactly_with_all_that_a_run_keeps(at, flags, undisturbed, tmp_path):
    source = undisturbed(2, *flags)
    train(2, stopped(source, tmp_path, at=at), *SAVING, *flags, "--resume", "latest")
    assert_ended_alike(tmp_path, source)


def test_slices_end_in_the_same_bits_on_another_number_of_ranks(undisturbed, tmp_path):
    source = undisturbed(2, "--slices", 5)
    train(3, stopped(source, tmp_path, at=3), *SAVING, "--slices", 5, "--resume", "latest")
    assert of("end", events(tmp_path), "weights_checksum") == of("end", events(source), "weights_checksum")


def test_resumes_from_a_path_and_leaves_that_run_alone(undisturbed, tmp_path):
    before = {path: path.read_bytes() for path in undisturbed(2).rglob("*") if path.is_file()}
    train(2, tmp_path, *SAVING, "--resume", checkpoint(undisturbed(2), 3))
    assert of("step", events(tmp_path), "loss") == of("step", events(undisturbed(2)), "loss")[3:]
    assert {path: path.read_bytes() for path in undisturbed(2).rglob("*") if path.is_file()} == before


def test_without_a_batch_size_a_resumed_run_keeps_its_global_batch(tmp_path):
    """On three ranks as on two, whose batches of 32 make 64."""
    flags = ("--epochs", 2, "--checkpoint-every", 2)
    for ranks, more in ((2, ()), (3, ("--resume", "latest", "--epochs", 3))):
        job = Job(ranks, "--output-dir", tmp_path, *flags, *more)
        schedule = dataclasses.replace(job.config.schedule, global_batch_size=None)
        job.config = dataclasses.replace(job.config, schedule=schedule)
        job.train()
    assert of("start", events(tmp_path), "global_batch_size") == [64, 64]


def test_a_finished_run_goes_on_for_more_epochs(undisturbed, tmp_path):
    train(1, tmp_path, *SAVING, "--epochs", 1, "--tensorboard")
    train(1, tmp_path, *SAVING, "--resume", "latest", "--tensorboard")
    assert_ended_alike(tmp_path, undisturbed(1))
    assert list((tmp_path / "tensorboard" / "steps").iterdir())


def test_a_finished_run_has_nothing_left_to_do(undisturbed, tmp_path, capsys):
    source = undisturbed(1)
    train(1, stopped(source, tmp_path, at=NUM_STEPS), *SAVING, "--resume", "latest")
    assert_ended_alike(tmp_path, source)
    assert "has all 2 epochs, so none is trained; raise --epochs to go on" in capsys.readouterr().err


def test_resumes_the_best(undisturbed, tmp_path):
    """Only the end of an epoch is measured: before the end of the second one, that of the first is the best."""
    source = undisturbed(1)
    stopped(source, tmp_path, at=6)
    train(1, tmp_path, *SAVING, "--resume", "best")
    assert_ended_alike(tmp_path, source)
    assert sequence(tmp_path, 6) > sequence(source, 6)  # step 6 was trained and saved again
    assert sequence(tmp_path, 4) == sequence(source, 4)


def sequence(output_dir: Path, step: int) -> int:
    """Return when a checkpoint was written among those of its directory."""
    return json.loads((checkpoint(output_dir, step) / "manifest.json").read_text())["sequence"]


def test_falls_back_from_a_damaged_checkpoint_with_a_warning(undisturbed, tmp_path, capsys):
    source = undisturbed(1)
    damaged = change_a_byte(checkpoint(stopped(source, tmp_path, at=6), 6) / "model.safetensors")
    capsys.readouterr()
    train(1, tmp_path, *SAVING, "--resume", "latest")
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("allstep: warning: ") and str(damaged) in warning and "falling back" in warning
    assert_ended_alike(tmp_path, source)


def test_a_fresh_run_keeps_what_was_there(undisturbed, tmp_path, capsys):
    source = undisturbed(1)
    stopped(source, tmp_path, at=6)
    train(1, tmp_path, *SAVING)
    assert "previous-1" in capsys.readouterr().err and checkpoint(tmp_path / "previous-1", 6).exists()
    assert_ended_alike(tmp_path, source)
    train(1, tmp_path, *SAVING)
    assert saved(tmp_path / "previous-2") == saved(source)


def test_a_run_that_is_refused_leaves_what_was_there(undisturbed, tmp_path):
    class Refuses(Check):
        def check(self, session):
            raise UserError("not so")

    stopped(undisturbed(1), tmp_path, at=6)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="not so"):
        train(1, tmp_path, *SAVING, hooks=lambda job, rank: [Refuses()])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_resumed_elsewhere_sets_aside_what_lies_there(undisturbed, tmp_path):
    stopped(undisturbed(1), tmp_path, at=NUM_STEPS)
    found = train(1, tmp_path, *SAVING, "--epochs", 3, "--resume", undisturbed(1))
    assert of("epoch", found, "epoch") == [3]
    assert of("epoch", events(tmp_path / "previous-1"), "epoch") == [1, 2]


MISTAKES = {
    "another seed": (["--resume", "latest", "--seed", "7"], "expected --seed 0"),
    "another data set": (["--resume", "latest", "--dataset", "digits"], "expected --dataset synthetic"),
    "another model": (["--resume", "latest", "--model", "mlp"], "expected --model cnn"),
    "another optimizer": (["--resume", "latest", "--optimizer", "nesterov"], "expected --optimizer sgd"),
    "no such checkpoint": (["--resume", "{}/nowhere"], "nowhere"),
    "a changed byte": (["--resume", "{}/checkpoints/step-00000006"], "step-00000006/model.safetensors is damaged"),
    "a newer format": (["--resume", "latest"], "has format 99"),
    "nothing there": (["--resume", "latest"], "train from the start"),
    "other samples": (["--resume", "latest", "--synthetic-samples", "225"], "expected 226 training samples"),
    "averages": (["--resume", "latest", "--ema", "0.9"], "expected --ema as in the run that wrote the checkpoint"),
    "no weights": (["--init-from", "{}/nowhere"], "path of a checkpoint"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_gone_on_from(mistake, num_ranks, undisturbed, tmp_path):
    """A trainer finds most of it before it imports its framework, by `check_early`; the run itself finds it, too."""
    stopped(undisturbed(1), tmp_path, at=6)
    if mistake == "a changed byte":
        change_a_byte(checkpoint(tmp_path, 6) / "model.safetensors")
    if mistake == "a newer format":
        manifest = checkpoint(tmp_path, 6) / "manifest.json"
        manifest.write_text(re.sub(r'"format_version": \d+', '"format_version": 99', manifest.read_text()))
    if mistake == "nothing there":
        shutil.rmtree(tmp_path / "checkpoints")
    flags, expected = MISTAKES[mistake]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    job = Job(num_ranks, "--output-dir", tmp_path, *SAVING, *(flag.format(tmp_path) for flag in flags))
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        job.train()
    assert "\n" not in str(error.value) and (tmp_path / "metrics.jsonl").read_bytes() == before
    if mistake not in ("a changed byte", "other samples", "averages"):
        with pytest.raises(UserError, match=re.escape(expected)):
            resuming.check_early(job.config)


def test_averages_are_kept_from_the_start_or_not_at_all(undisturbed, tmp_path):
    with pytest.raises(UserError, match="expected --ema as in the run that wrote the checkpoint"):
        train(1, tmp_path, "--resume", undisturbed(2, "--ema", 0.9))


def test_starts_from_the_weights_of_another_run(undisturbed, tmp_path):
    """A learning rate that is 0 in float32 moves no weight."""
    found = train(2, tmp_path, "--epochs", 1, "--base-lr", "1e-60", "--init-from", undisturbed(1))
    assert of("end", found, "weights_checksum") == of("end", events(undisturbed(1)), "weights_checksum")
    assert of("step", found, "step") == [1, 2, 3, 4]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_resume_auto_starts_where_nothing_is_and_goes_on_from_the_newest(num_ranks, undisturbed, tmp_path):
    """The same words again and again, as of a batch script; --init-from is for the first time alone."""
    flags = (*SAVING, "--resume", "auto", "--init-from", checkpoint(undisturbed(num_ranks), 4))
    whole = train(num_ranks, tmp_path / "whole", *flags)
    assert of("step", whole, "step") == list(range(1, 9))
    assert of("step", whole, "loss")[0] < of("step", events(undisturbed(num_ranks)), "loss")[0]
    again = stopped(tmp_path / "whole", tmp_path / "again", at=3)
    train(num_ranks, again, *flags)
    assert_ended_alike(again, tmp_path / "whole")
    train(num_ranks, again, *flags)
    assert of("step", events(again), "step") == list(range(1, 9)) and not list(again.glob("previous-*"))


def test_resume_auto_refuses_what_latest_refuses(undisturbed, tmp_path):
    """Other ranks than the first need not see the output directory."""
    stopped(undisturbed(2), tmp_path, at=6)
    job = Job(2, "--output-dir", tmp_path, *SAVING, "--resume", "auto", "--seed", 7)
    for act in (job.train, lambda: resuming.check_early(job.config)):
        with pytest.raises(UserError, match="expected --seed 0"):
            act()


def test_a_second_run_cannot_write_there(tmp_path):
    with (
        OutputDirectory(tmp_path, warn=pytest.fail),
        pytest.raises(UserError, match=f"is in use by pid {os.getpid()} on"),
    ):
        train(1, tmp_path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--checkpoint-every", 3, "--keep-checkpoints", 100), [3, 4, 6, 8, 9, 12]),
        (("--checkpoint-every", 0, "--keep-checkpoints", 100), [4, 8, 12]),
        (("--checkpoint-every", 4, "--keep-checkpoints", 100), [4, 8, 12]),
        (("--checkpoint-every", 1, "--keep-checkpoints", 2), [11, 12]),
    ],
    ids=str,
)
def test_checkpoints_are_saved_as_often_and_kept_as_asked(flags, expected, tmp_path):
    """The best one is kept as well: validation improves, so that is the last."""
    found = train(2, tmp_path, "--epochs", 3, *flags)
    accuracies = of("epoch", found, "validation_accuracy")
    best = 4 * (accuracies.index(max(accuracies)) + 1)
    assert saved(tmp_path) == sorted({*expected, best})


def test_nothing_is_written_without_an_output_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Job(2, "--epochs", 1).train()
    assert not list(tmp_path.iterdir())
    assert len(re.findall("Epoch =  1: ", capsys.readouterr().out)) == 1  # one rank speaks


def test_a_run_reports_what_the_page_of_files_lists(tmp_path):
    found = train(2, tmp_path, "--epochs", 2)
    start, end = found[0], found[-1]
    assert [event["event"] for event in found] == ["start", *["step"] * 4, "epoch", *["step"] * 4, "epoch", "end"]
    assert (start["world_size"], start["global_batch_size"], start["device"]) == (2, 59, "cpu")
    assert start["parameter_count"] == 10 * 64 + 10 and start["versions"]["numpy"] == np.__version__
    assert len(end["weights_checksum"]) == 64 and end["peak_memory_bytes"] > 0
    assert of("step", found, "epoch")[:4] == pytest.approx([59 / 226, 118 / 226, 177 / 226, 1])
    epochs = [event for event in found if event["event"] == "epoch"]
    seconds = [event["epoch_seconds"] for event in epochs]
    assert [event["cumulative_seconds"] for event in epochs] == pytest.approx([seconds[0], sum(seconds)])
    assert [event["images_per_second"] * event["epoch_seconds"] for event in epochs] == pytest.approx([226, 226])
    resolved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert resolved["synthetic-samples"] == 226 and resolved["global-batch-size"] == 59


def test_the_written_configuration_trains_the_same(tmp_path):
    first = train(1, tmp_path / "1", "--epochs", 1, "--momentum", 0.5)
    again = train(1, tmp_path / "2", "--config", tmp_path / "1" / "config.yaml")
    assert of("step", again, "loss") == of("step", first, "loss") and len(of("epoch", again, "epoch")) == 1


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The losses stay finite, since no step after the seventh reports its own."""

    class Breaks(Hook):
        def on_step(self, session):
            if session.progress.step == 7:
                session.worker.weights["fc.bias"][0] = np.nan

    def prepare(run):
        step = run.worker.train_step
        run.worker.train_step = lambda *arguments: step(*arguments) if run.progress.step < 7 else StepResult(0.0)
        return run

    flags = ("--epochs", 2, "--checkpoint-every", 1, "--keep-checkpoints", 1)
    with pytest.raises(UserError, match="finite weights and slots to save, received nan or inf in model/fc.bias"):
        train(2, tmp_path, *flags, prepare=prepare, hooks=lambda job, rank: [Breaks()])
    assert 7 not in saved(tmp_path) and 6 in saved(tmp_path)
