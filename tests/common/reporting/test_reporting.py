"""The reports of a run. Oracles: the specified epoch line, TensorBoard's own reader, a real terminal."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import OutputDirectory
from allstep.common.checkpoint.lock import LOCK
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.data.sharding import Position
from allstep.common.recipe.progress import Progress
from allstep.common.reporting import open_reporter
from allstep.common.reporting.base import epoch_line, output_dir_errors
from allstep.common.reporting.jsonl import JsonLines, rewind
from allstep.common.training.beginning import set_aside

EPOCH = {
    "train_loss": 0.5,
    "validation_loss": 0.278,
    "validation_accuracy": 0.9034,
    "validation_samples": 360,
    "epoch_seconds": 32.6351,
    "cumulative_seconds": 65.2699,
    "images_per_second": 1835.61,
    "learning_rate": 0.05,
}
STEPS_PER_EPOCH = 4


def tell(output_dir: Path, *, until: int, progress: Progress | None = None, tensorboard: bool = False) -> None:
    """Report a run from `progress` to the step `until`, and its end if that step completes the second epoch."""
    progress = progress or Progress()
    config = TrainConfig(output=OutputConfig(output_dir=output_dir, tensorboard=tensorboard))
    reporter = open_reporter(config, 0, progress)
    reporter.event("start", world_size=1)
    for step in range(progress.step + 1, until + 1):
        reporter.event("step", step=step, epoch=step / STEPS_PER_EPOCH, learning_rate=0.05, loss=1 / step)
        if step % STEPS_PER_EPOCH == 0:
            reporter.event("epoch", epoch=step // STEPS_PER_EPOCH, **EPOCH)
    if until == 2 * STEPS_PER_EPOCH:
        reporter.event("end", weights_checksum="0", peak_memory_bytes=1)
    reporter.close()


def at_step(step: int) -> Progress:
    """Return the progress of a run after `step` steps."""
    return Progress(position=Position(step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH), step=step)


def printed(output_dir: Path, name: str) -> list[int]:
    events = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [event.get(name, 0) for event in events if event["event"] == name]


def test_epoch_line_is_that_of_the_contract():
    assert epoch_line(epoch=1, **EPOCH) == (
        "Epoch =  1: Cumulative Time = 65.270, Epoch Time = 32.635, Images/sec = 1835.6, "
        "Validation Loss = 0.278, Validation Accuracy = 0.903"
    )
    assert epoch_line(epoch=12, **EPOCH).startswith("Epoch = 12: ")


def test_other_ranks_are_silent(tmp_path, capfd):
    config = TrainConfig(output=OutputConfig(output_dir=tmp_path, tensorboard=True))
    reporter = open_reporter(config, 1, Progress())
    reporter.event("epoch", epoch=1, **EPOCH)
    reporter.progress(1, 2, 3)
    reporter.close()
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_each_line_is_there_before_the_next_event(tmp_path):
    reporter = open_reporter(TrainConfig(output=OutputConfig(output_dir=tmp_path)), 0, Progress())
    for step in range(1, 4):
        reporter.event("step", step=step, loss=0.1)
        assert printed(tmp_path, "step")[-1] == step
    reporter.close()


@pytest.mark.parametrize("killed_at", range(1, 2 * STEPS_PER_EPOCH + 1))
@pytest.mark.parametrize("saved", range(2 * STEPS_PER_EPOCH + 1))
def test_a_resumed_run_tells_everything_once(killed_at, saved, tmp_path):
    """A run is killed after some step and resumed from the same or an earlier one, in mid-epoch or between epochs."""
    if saved > killed_at:
        return
    tell(tmp_path, until=killed_at)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 9')  # the run was killed during this write
    tell(tmp_path, until=2 * STEPS_PER_EPOCH, progress=at_step(saved))
    assert printed(tmp_path, "step") == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert printed(tmp_path, "epoch") == [1, 2]
    assert len(printed(tmp_path, "end")) == 1
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("change", ["unlink", "rename", "replace", "link"])
def test_lines_after_metrics_were_removed_are_not_lost(change, tmp_path, capfd):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "old.jsonl"
    (tmp_path / LOCK).touch()
    reporter = JsonLines(path)
    reporter.event("step", step=1)
    if change == "replace":  # as editors do
        aside.write_text(path.read_text())
        aside.rename(path)
    else:
        path.unlink() if change == "unlink" else path.rename(aside)
        if change == "link":
            (other := tmp_path / "other.jsonl").touch()
            path.symlink_to(other)
    for step in (2, 3):
        reporter.event("step", step=step)
    reporter.close()
    assert printed(tmp_path, "step") == ([1, 2, 3] if change == "replace" else [2, 3])
    assert not aside.exists() or len(aside.read_text().splitlines()) == 1
    assert capfd.readouterr().err.count(f"warning: {path} was removed or renamed; later events go to a new file") == 1


def test_metrics_of_another_run_in_the_same_folder_are_left_alone(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with OutputDirectory(path.parent, warn=print):
        reporter = JsonLines(path)
        shutil.rmtree(path.parent)
        with OutputDirectory(path.parent, warn=print):
            path.write_text("")
            with pytest.raises(UserError, match="belongs to another run now"):
                reporter.event("step", step=1)
            assert path.read_text() == ""
        reporter.close()


def test_a_folder_that_is_renamed_while_it_is_written_to_is_said(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    reporter = JsonLines(path)
    path.parent.rename(tmp_path / "renamed")
    with pytest.raises(UserError, match="its folder was removed or renamed: name it by --output-dir as it is now"):
        reporter.event("step", step=1)


def test_rewinding_to_a_finished_epoch_keeps_its_line(tmp_path):
    tell(tmp_path, until=6)
    rewind(tmp_path / "metrics.jsonl", step=4, epoch=1)
    assert (printed(tmp_path, "step"), printed(tmp_path, "epoch")) == ([1, 2, 3, 4], [1])


@pytest.mark.parametrize("line", ["7", "{}", '{"event": 1}', '{"event": "step", "step": "1"}', '{"event": []}'])
def test_rewinding_what_is_no_runs(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="metrics.jsonl is no run's: expected .* received .*; move it"):
        rewind(tmp_path / "metrics.jsonl", step=4, epoch=1)
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"


@pytest.mark.parametrize(
    "garbage", [b"garbage\n", b"\xff\x00\n", b"garbage", b"[1\n" * 3, b'{"event": "step", "x": "\xff"}\n']
)
@pytest.mark.parametrize("before", [0, 3])
def test_a_damaged_file_is_kept_beside(garbage, before, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    tell(tmp_path, until=3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole := b"".join(lines[:before]) + garbage + (b"" if garbage == b"garbage" else lines[before]))
    rewind(path, step=8, epoch=2)
    assert path.with_name("metrics.jsonl.damaged-1").read_bytes() == whole
    assert path.read_bytes() == whole.replace(garbage, b"")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"the file as it was is kept in {path}.damaged-1") and "line(s)" in line


@pytest.mark.parametrize("kind", ["FIFO", "folder", "loop"])
def test_what_is_no_file_is_not_full(kind, tmp_path):
    path = tmp_path / "metrics.jsonl"
    {"FIFO": os.mkfifo, "folder": os.mkdir, "loop": lambda path: path.symlink_to(path)}[kind](path)
    with pytest.raises(UserError, match="move it elsewhere, or name another --output-dir"):
        JsonLines(path)


def test_a_file_system_that_became_read_only(tmp_path):
    refused = pytest.raises(
        UserError, match="Read-only file system; mount it for writing, or name another --output-dir"
    )
    with refused, output_dir_errors(tmp_path / "metrics.jsonl"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_fifo_is_neither_rewound_nor_written_to(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for open_it in (lambda path: rewind(path, step=4, epoch=1), JsonLines):
        with pytest.raises(UserError, match="expected a regular file, received a FIFO"):
            open_it(tmp_path / "metrics.jsonl")


def test_a_broken_link_is_not_followed(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="No such file or directory; move it elsewhere"):
        rewind(tmp_path / "metrics.jsonl", step=4, epoch=1)
    set_aside(tmp_path)
    assert (tmp_path / "previous-1" / "metrics.jsonl").is_symlink() and not (tmp_path / "elsewhere").exists()


def test_rewinding_nothing(tmp_path):
    rewind(tmp_path / "metrics.jsonl", step=4, epoch=1)
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_it_back(tmp_path):
    scalars = read_scalars(tmp_path, until=8)
    assert scalars["step/loss"] == {step: pytest.approx(1 / step) for step in range(1, 9)}
    assert scalars["step/learning_rate"] == {step: pytest.approx(0.05) for step in range(1, 9)}
    for name in ("train_loss", "validation_loss", "validation_accuracy", "images_per_second"):
        assert scalars[f"epoch/{name}"] == {epoch: pytest.approx(EPOCH[name]) for epoch in (1, 2)}


@pytest.mark.parametrize("saved", [3, 4, 5])
def test_tensorboard_hides_what_a_resumed_run_tells_again(saved, tmp_path):
    tell(tmp_path, until=7, tensorboard=True)
    scalars = read_scalars(tmp_path, until=8, progress=at_step(saved))
    assert list(scalars["step/loss"]) == list(range(1, 9))
    assert list(scalars["epoch/validation_loss"]) == [1, 2]


def read_scalars(output_dir: Path, **run: object) -> dict[str, dict[int, float]]:
    """Report a run to TensorBoard, and return the values of all steps by tag, as TensorBoard reads them.

    A step that is there twice counts as an error.
    """
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    tell(output_dir, tensorboard=True, **run)
    reader = EventMultiplexer().AddRunsFromDirectory(str(output_dir / "tensorboard")).Reload()
    scalars = {}
    for folder, tags in reader.Runs().items():
        for tag in tags["scalars"]:
            events = reader.Scalars(folder, tag)
            scalars[tag] = {event.step: event.value for event in events}
            assert len(scalars[tag]) == len(events), events
    return scalars


TELL_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from allstep.common.base.errors import UserError
from allstep.common.recipe.progress import Progress
from allstep.common.training.beginning import set_aside
from allstep.common.reporting.jsonl import JsonLines, rewind
from allstep.common.reporting.trackers import TensorBoard
path = Path(sys.argv[1])

def check(call, *arguments, **keywords):
    try:
        return call(*arguments, **keywords)
    except UserError as error:
        print(error)

def tell(reporter):
    for step in range(1, 1000):
        reporter.event("step", step=step, learning_rate=0.1, loss=0.5)

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

limit(20_000)
reporter = check(REPORTER)
check(tell, reporter)
check(reporter.close)
limit(0)
check(REOPEN)
"""


@pytest.mark.parametrize(
    ("name", "reporter", "reopen"),
    [
        ("metrics.jsonl", "JsonLines, path", "rewind, path, step=900, epoch=0"),
        ("tensorboard/steps", "TensorBoard, path.parent, Progress()", "TensorBoard, path.parent, Progress()"),
    ],
)
def test_a_full_disk_is_one_line(name, reporter, reopen, tmp_path):
    """A limit on file size stands in for a full disk during an event, while closing, and when opening again."""
    program = TELL_ON_A_FULL_DISK.replace("REPORTER", reporter).replace("REOPEN", reopen)
    path = tmp_path / name
    has_checkpoints = path.suffix == ".jsonl"
    if has_checkpoints:
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    result = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    advice = "the checkpoints are unharmed: make room, then --resume latest" if has_checkpoints else "make room"
    assert (result.stdout, result.stderr) == (
        f"expected to write {path}, received the error: File too large; {advice}\n" * 3,
        "",
    )


def test_tensorboard_needs_no_framework(tmp_path):
    program = (
        "import sys; from pathlib import Path; from allstep.common.recipe.progress import Progress\n"
        "from allstep.common.reporting.trackers import TensorBoard\n"
        "TensorBoard(Path(sys.argv[1]), Progress()).close(); print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True, timeout=300)
    assert result.stdout == "set()\n"


SHOW_PROGRESS = """
from allstep.common.config.train_config import ScheduleConfig, TrainConfig
from allstep.common.base.errors import UserError
from allstep.common.recipe.progress import Progress
from allstep.common.reporting import open_reporter
import time
reporter = open_reporter(TrainConfig(schedule=ScheduleConfig(epochs=3)), RANK, Progress())
for done in range(0, 101, 10):
    reporter.progress(2, done, 100)
    time.sleep(0.02)
reporter.event("epoch", epoch=2, train_loss=1, validation_loss=1, validation_accuracy=1, epoch_seconds=1,
               cumulative_seconds=1, images_per_second=1)
reporter.close()
"""


@pytest.mark.parametrize(("rank", "terminal"), [(0, True), (0, False), (1, True)])
def test_progress_bar_on_a_terminal_alone(rank, terminal):
    """Standard error is a real terminal; standard output is piped, as under a launcher."""
    listener, speaker = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW_PROGRESS.replace("RANK", str(rank))],
        stdout=subprocess.PIPE,
        stderr=speaker if terminal else subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(speaker)
    output, errors = process.communicate(timeout=60)
    quote = read_all(listener) if terminal else errors.decode()
    assert process.returncode == 0, quote
    assert ("epoch 2/3" in quote) == (rank == 0 and terminal)
    assert re.fullmatch(r"Epoch =  2: [^\x1b]*\n" if rank == 0 else "", output.decode())
    if not terminal or rank:
        assert quote == ""


def read_all(terminal: int) -> str:
    """Return everything written to a terminal whose other side is closed."""
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # Linux reports the end as EIO
        pass
    os.close(terminal)
    return b"".join(parts).decode()
