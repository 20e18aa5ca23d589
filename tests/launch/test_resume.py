"""A resumed run ends like an uninterrupted one. Oracle: the uninterrupted run; for mistakes, the contract.

PyTorch on the same number of ranks gives equal bits; otherwise weights are within 1e-6, and the accuracy is equal.
"""

from __future__ import annotations

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
from allstep.commands.soak.resume_check import training
from allstep.common.checkpoint import load

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


def test_one_of_two_ranks_tells_that_there_is_nothing_to_resume(tmp_path):
    result = launch("horovodrun-mpi", 2, "pytorch/train.py", "--output-dir", tmp_path, "--resume", "latest")
    assert result.returncode == 2 and result.output.count("allstep: error: ") == 1, result.output
    assert "train from the start" in result.output and "Traceback" not in result.output


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


@pytest.mark.cold
def test_a_second_run_cannot_write_there(tmp_path):
    with training("pytorch", 1, tmp_path, "--epochs", 1000) as first:
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
