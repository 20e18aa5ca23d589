"""Changes to the folder of a run between two parts of it. Oracle: the undisturbed run, on NumPy workers.

Other lives are tested where their mechanism is: kills at any moment and full disks (`common/checkpoint`), other numbers
of ranks, other flags, `--resume auto` and `best` (`common/training`), signals and two runs at once (`launch`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from numpy_ranks import of, train
from ranks import events
from undisturbed_runs import NUM_STEPS, SAVING, assert_ended_alike, checkpoint, saved, undisturbed  # noqa: F401

from allstep.common.base.errors import UserError


def is_moved(run: Path) -> Path:
    return run.rename(run.with_name("elsewhere"))


def has_a_name_with_spaces(run: Path) -> Path:
    return run.rename(run.with_name("my run (2), it's `final`"))


def has_a_name_that_is_no_ascii(run: Path) -> Path:
    return run.rename(run.with_name("Läufe-測試"))


def is_copied_without_times(run: Path) -> Path:
    for path in run.rglob("*"):  # as from an archive
        os.utime(path, (0, 0))
    return run


def is_reached_by_a_link(run: Path) -> Path:
    (link := run.with_name("link")).symlink_to(run)
    return link


def is_named_in_a_roundabout_way(run: Path) -> Path:
    return run / "checkpoints" / ".." / ".." / run.name


def has_lost_its_metrics(run: Path) -> Path:
    (run / "metrics.jsonl").unlink()
    return run


def has_half_a_line_in_its_metrics(run: Path) -> Path:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 7, "lo')
    return run


def has_lost_its_configuration(run: Path) -> Path:
    (run / "config.yaml").unlink()
    return run


def has_lost_its_lock(run: Path) -> Path:
    (run / ".lock").unlink()
    return run


def has_a_lock_of_a_process_that_is_gone(run: Path) -> Path:
    (run / ".lock").write_text("pid 1 on host elsewhere\n")
    return run


def has_lost_older_checkpoints(run: Path) -> Path:
    for step in saved(run)[:-1]:
        shutil.rmtree(checkpoint(run, step))
    return run


def has_lost_the_newest_checkpoint(run: Path) -> Path:
    shutil.rmtree(checkpoint(run, saved(run)[-1]))
    return run


def has_half_a_checkpoint(run: Path) -> Path:
    (whole := checkpoint(run, 6)).rename(half := whole.with_name(f".tmp-{whole.name}"))
    (half / "manifest.json").unlink()
    return run


def has_a_copy_of_a_checkpoint_by_its_user(run: Path) -> Path:
    shutil.copytree(checkpoint(run, 6), run / "checkpoints" / "step-00000006 (copy)")
    return run


def has_files_of_its_user(run: Path) -> Path:
    (run / "checkpoints" / "notes.txt").write_text("mine")
    (run / "previous-1").mkdir()
    return run


def is_from_the_future(run: Path) -> Path:
    """Each time in it is a day later than this machine's clock, which has been set back."""
    tomorrow = time.time() + 86400
    for path in run.rglob("*"):
        os.utime(path, (tomorrow, tomorrow))
    return run


LIVES = [
    *(is_moved, has_a_name_with_spaces, has_a_name_that_is_no_ascii, is_copied_without_times, is_reached_by_a_link),
    *(is_named_in_a_roundabout_way, has_lost_its_metrics, has_half_a_line_in_its_metrics, has_lost_its_configuration),
    *(has_lost_its_lock, has_a_lock_of_a_process_that_is_gone, has_lost_older_checkpoints, is_from_the_future),
    *(has_lost_the_newest_checkpoint, has_half_a_checkpoint, has_a_copy_of_a_checkpoint_by_its_user),
    has_files_of_its_user,
]


def stopped(source: Path, run: Path) -> Path:
    """Copy a run as if it had been killed after step 6."""
    shutil.copytree(source, run)
    for step in saved(run):
        if step > 6:
            shutil.rmtree(checkpoint(run, step))
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line).get("step", 0) <= 6]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if '"end"' not in line))
    return run


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_goes_on_as_if_undisturbed(life, undisturbed, tmp_path):  # noqa: F811
    run = life(stopped(undisturbed(1), tmp_path / "run"))
    train(1, run, *SAVING, "--resume", "latest")
    if life is has_lost_its_metrics:
        assert of("step", events(run), "step") == list(range(7, NUM_STEPS + 1))
        ends = [of("end", events(one), "weights_checksum") for one in (run, undisturbed(1))]
        assert ends[0] == ends[1]
    else:
        assert_ended_alike(run, undisturbed(1))


def test_two_copies_of_a_run_go_on_each_by_itself(undisturbed, tmp_path):  # noqa: F811
    one, other = (stopped(undisturbed(1), tmp_path / name) for name in ("a", "b"))
    for run in (one, other):
        train(1, run, *SAVING, "--resume", "latest")
        assert_ended_alike(run, undisturbed(1))


def test_a_run_that_is_stopped_again_and_again(undisturbed, tmp_path):  # noqa: F811
    """Each part takes one step and is killed before it reports the next."""
    run = stopped(undisturbed(1), tmp_path / "run")
    for _ in range(3):
        train(1, run, *SAVING, "--resume", "latest")
        shutil.rmtree(checkpoint(run, NUM_STEPS))
    train(1, run, *SAVING, "--resume", "latest")
    assert_ended_alike(run, undisturbed(1))


def test_a_clock_that_goes_back(undisturbed, tmp_path, monkeypatch):  # noqa: F811
    run, real = stopped(undisturbed(1), tmp_path / "run"), time.time
    monkeypatch.setattr(time, "time", lambda: real() - 10**8)
    train(1, run, *SAVING, "--resume", "latest")
    assert_ended_alike(run, undisturbed(1))
    assert all(event["cumulative_seconds"] >= 0 for event in events(run) if event["event"] == "epoch")


def test_a_run_without_checkpoints_says_so(undisturbed, tmp_path):  # noqa: F811
    run = stopped(undisturbed(1), tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="train from the start"):
        train(1, run, *SAVING, "--resume", "latest")
