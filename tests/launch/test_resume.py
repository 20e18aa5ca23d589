"""A resumed run ends like an uninterrupted one. Oracle: the uninterrupted run; for mistakes, the contract.

PyTorch on the same number of ranks gives equal bits; otherwise weights are within 1e-6, and the accuracy is equal.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Result, environment, events, full, last, launch, run

from allstep.commands.parity import command as parity
from allstep.commands.parity import curves
from allstep.commands.soak import command as soak
from allstep.common.checkpoint import load

FRAMEWORKS = ["pytorch", "tensorflow"]
NUM_STEPS = soak.NUM_STEPS  # 2 epochs of 25
FLAGS = (*parity.DATA_FLAGS, *parity.SETTINGS["momentum"].flags, "--log-every", 1, "--checkpoint-every", 10)


def train(framework: str, num_ranks: int, output_dir: Path, *flags: str | int) -> Result:
    """Train to the end; one rank runs without a launcher."""
    launcher = "alone" if num_ranks == 1 else "horovodrun-mpi"
    command = [f"{framework}/train.py", "--output-dir", output_dir, *FLAGS, "--epochs", 2, *flags]
    result = launch(launcher, num_ranks, *map(str, command))
    assert result.returncode == 0, result.output
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that gives the output directory of an uninterrupted run, with all its checkpoints."""
    made: dict[tuple[str, int], Path] = {}

    def make(framework: str, num_ranks: int) -> Path:
        key = framework, num_ranks
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed")
            train(framework, num_ranks, made[key], "--keep-checkpoints", 100)
        return made[key]

    return make


def stopped(source: Path, output_dir: Path, *, at: int) -> Path:
    """Copy a run as if it had reported all steps but saved no checkpoint after step `at` before it was killed."""
    shutil.copytree(source, output_dir, dirs_exist_ok=True)
    for path in (output_dir / "checkpoints").iterdir():
        if path.name > checkpoint(output_dir, at).name:
            shutil.rmtree(path)
    return output_dir


def checkpoint(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def final_weights(output_dir: Path) -> dict:
    path = checkpoint(output_dir, NUM_STEPS)
    return curves.weights_of(load(path, path.parent, warn=print))


def assert_ended_alike(output_dir: Path, expected: Path, *, exactly: bool) -> None:
    received, wanted = events(output_dir), events(expected)
    assert reported_once(received) == reported_once(wanted)
    if exactly:
        assert last(received, "end")["weights_checksum"] == last(wanted, "end")["weights_checksum"]
    else:
        assert curves.weights_apart(final_weights(expected), final_weights(output_dir)) <= 1e-6
    for name in ("validation_samples", "validation_accuracy"):
        assert epochs(received, name) == epochs(wanted, name)
    for name in ("train_loss", "validation_loss", "learning_rate"):
        assert epochs(received, name) == pytest.approx(epochs(wanted, name), rel=1e-9 if exactly else 1e-5)


def reported_once(reported: list[dict]) -> list[tuple[str, int | None]]:
    """Return events with their steps or epochs, without starts, of which a resumed run has more."""
    return [(event["event"], event.get("step", event.get("epoch"))) for event in reported if event["event"] != "start"]


def epochs(reported: list[dict], name: str) -> list[float]:
    return [event[name] for event in reported if event["event"] == "epoch"]


@pytest.mark.parametrize(
    ("framework", "before", "after"),
    [("pytorch", 2, 2), full("pytorch", 2, 3), full("pytorch", 2, 1), ("tensorflow", 2, 1), full("tensorflow", 2, 2)],
)
def test_goes_on_in_mid_epoch_on_any_number_of_ranks(framework, before, after, undisturbed, tmp_path):
    source = undisturbed(framework, before)
    assert epochs(events(source), "validation_samples") == [360, 360]
    train(framework, after, stopped(source, tmp_path, at=30), "--resume", "latest")
    assert_ended_alike(tmp_path, source, exactly=framework == "pytorch" and before == after)


def test_a_finished_run_goes_on_for_more_epochs(undisturbed, tmp_path):
    train("pytorch", 1, tmp_path, "--epochs", 1, "--tensorboard")
    train("pytorch", 1, tmp_path, "--resume", "latest", "--tensorboard")
    assert_ended_alike(tmp_path, undisturbed("pytorch", 1), exactly=True)
    assert list((tmp_path / "tensorboard" / "steps").iterdir())


def test_a_finished_run_has_nothing_left_to_do(undisturbed, tmp_path):
    source = undisturbed("pytorch", 1)
    train("pytorch", 1, stopped(source, tmp_path, at=NUM_STEPS), "--resume", "latest")
    assert_ended_alike(tmp_path, source, exactly=True)


def test_resumes_the_best(undisturbed, tmp_path):
    """Only ends of epochs are validated, so the end of the first is the best before the end of the second."""
    source = undisturbed("pytorch", 1)
    stopped(source, tmp_path, at=40)
    train("pytorch", 1, tmp_path, "--resume", "best", "--keep-checkpoints", 100)
    assert_ended_alike(tmp_path, source, exactly=True)
    assert sequence(tmp_path, 30) > sequence(source, 40)  # step 30 was trained and saved again
    assert sequence(tmp_path, 25) == sequence(source, 25)


def sequence(output_dir: Path, step: int) -> int:
    """Return the position of a checkpoint in the order in which its directory was written."""
    return json.loads((checkpoint(output_dir, step) / "manifest.json").read_text())["sequence"]


def test_falls_back_from_a_damaged_checkpoint_with_a_warning(undisturbed, tmp_path):
    source = undisturbed("pytorch", 1)
    damaged = checkpoint(stopped(source, tmp_path, at=40), 40) / "model.safetensors"
    change_a_byte(damaged)
    result = train("pytorch", 1, tmp_path, "--resume", "latest")
    [warning] = result.stderr.splitlines()
    assert warning.startswith("allstep: warning: ") and str(damaged) in warning and "falling back" in warning
    assert_ended_alike(tmp_path, source, exactly=True)


def test_starting_anew_keeps_what_was_there(undisturbed, tmp_path):
    source = undisturbed("pytorch", 1)
    stopped(source, tmp_path, at=30)
    result = train("pytorch", 1, tmp_path)
    assert "previous-1" in result.stderr and checkpoint(tmp_path / "previous-1", 30).exists()
    assert_ended_alike(tmp_path, source, exactly=True)


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def raise_format(manifest: Path) -> None:
    manifest.write_text(re.sub(r'"format_version": \d+', '"format_version": 99', manifest.read_text()))


MISTAKES = {
    "another seed": (["--resume", "latest", "--seed", "7"], "expected --seed 0"),
    "another data set": (["--resume", "latest", "--dataset", "synthetic"], "expected --dataset digits"),
    "another model": (["--resume", "latest", "--model", "mlp"], "expected --model cnn"),
    "another optimizer": (["--resume", "latest", "--optimizer", "nesterov"], "expected --optimizer sgd"),
    "no such checkpoint": (["--resume", "{}/nowhere"], "nowhere"),
    "a changed byte": (["--resume", "{}/checkpoints/step-00000030"], "step-00000030/model.safetensors is damaged"),
    "a newer format": (["--resume", "latest"], "has format 99"),
    "nothing there": (["--resume", "latest"], "start without --resume"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_gone_on_from(mistake, undisturbed, tmp_path):
    stopped(undisturbed("pytorch", 1), tmp_path, at=30)
    if mistake == "a changed byte":
        change_a_byte(checkpoint(tmp_path, 30) / "model.safetensors")
    if mistake == "a newer format":
        raise_format(checkpoint(tmp_path, 30) / "manifest.json")
    if mistake == "nothing there":
        shutil.rmtree(tmp_path / "checkpoints")
    flags, expected = MISTAKES[mistake]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    flags = [*map(str, FLAGS), *(flag.format(tmp_path) for flag in flags)]
    result = launch("alone", 1, "pytorch/train.py", "--output-dir", tmp_path, *flags)
    assert_refused(result, expected)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_of_two_ranks_tells_that_there_is_nothing_to_resume(framework, tmp_path):
    result = launch("horovodrun-mpi", 2, f"{framework}/train.py", "--output-dir", tmp_path, "--resume", "latest")
    assert result.returncode == 2 and result.output.count("allstep: error: ") == 1, result.output
    assert "start without --resume" in result.output and "Traceback" not in result.output


HANGING = """
import dataclasses, time
from allstep.commands.soak.fault_injection import Wrapped
from allstep.common.cli.command_line import parse
from allstep.common.process.exit import run_rank
from allstep.common.launch.placement import find_placement
from allstep.pytorch import train
class Hangs(Wrapped):
    def state_shapes(self):  # called to read the checkpoint
        print("reading", flush=True)
        time.sleep(1000)
def main():
    placement = find_placement()
    session = train.session(parse(train.strategies.STRATEGIES, placement), placement)
    dataclasses.replace(session, worker=Hangs(session.worker)).train()
run_rank(main)
"""


def test_one_notice_ends_a_run_that_reads_a_checkpoint_forever(tmp_path):
    """A file server may not respond. No step was trained, so there is no state to save."""
    (tmp_path / "hanging.py").write_text(HANGING)
    command = [sys.executable, tmp_path / "hanging.py", "--output-dir", tmp_path, "--resume", "latest"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment(), start_new_session=True) as process:
        assert process.stdout.readline() == "reading\n"
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    [line] = errors.splitlines()
    assert line.endswith("stopped at step 0: SIGTERM came before anything was trained")


def test_a_second_run_cannot_write_there(tmp_path):
    with soak.training("pytorch", 1, tmp_path, "--epochs", 1000) as first:
        first.wait_for_step(1, delay=0)
        result = launch("alone", 1, "pytorch/train.py", "--output-dir", tmp_path)
        assert first.status is None, first.printed()
    assert_refused(result, f"is in use by pid {first.process.pid} on host")


def assert_refused(result: Result, expected: str) -> None:
    assert (result.returncode, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("allstep: error: ") and expected in line


@pytest.mark.parametrize("kills", [2, full(4)])
def test_killed_at_random_moments(kills):
    """Run the short form of `make soak`; the command lists its checks after each kill and at the end."""
    result = run("allstep", "soak", "--kills", str(kills), "--faults", "0", "--ranks", "1,2", timeout=600)
    assert result.returncode == 0, result.output
    assert result.stdout.count("\nkill ") == kills and "0 violations" in result.stdout


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_ranks_stop_early_together(framework, tmp_path):
    """The learning rate is 0 in float32, so epochs 2 and 3 bring no gain, which exhausts a patience of 2."""
    flags = ("--model", "mlp", "--base-lr", "1e-60", "--early-stop-patience", "2", "--output-dir", tmp_path)
    result = launch("horovodrun-mpi", 2, f"{framework}/train.py", *flags)
    assert result.returncode == 0, result.output
    assert epochs(events(tmp_path), "epoch") == [1, 2, 3]
    assert last(events(tmp_path), "end")
    if framework == "pytorch":
        again = launch("horovodrun-mpi", 2, "pytorch/train.py", *flags, "--resume", "latest")
        assert again.returncode == 0 and again.stdout == "", again.output
        assert epochs(events(tmp_path), "epoch") == [1, 2, 3]
