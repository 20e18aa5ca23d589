"""Elastic jobs: a killed, a suspended and a late rank, a host that leaves and returns, and Ctrl-C under a real
horovodrun; a killed rank under torchrun.

Oracle: an undisturbed run of `single`; the faults that `ranks/elastic.py` and `ranks/elastic_torchrun.py` cause.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from jobs import losses
from ranks import Result, events, full, run, train

from allstep.commands.shared import process_tree
from allstep.commands.soak.faults import CLEAN_SECONDS
from allstep.commands.soak.training import training
from allstep.common.checkpoint import load

SCRIPT = Path(__file__).parent / "ranks" / "elastic.py"
FLAGS = ("--global-batch-size", 32, "--log-every", 1, "--model", "mlp", "--slices", 4)


_TENSORFLOW = pytest.param("tensorflow", marks=[pytest.mark.full, pytest.mark.cold])


@pytest.fixture(scope="module", params=["pytorch", _TENSORFLOW])
def job(request, tmp_path_factory) -> tuple[str, Path, Result, list]:
    """Run the job; return the framework, the output directory, the result, and processes that are left."""
    directory = tmp_path_factory.mktemp("elastic")
    (directory / "hosts").write_text("localhost:2\n127.0.0.1:2\n")
    ranks = ("-np", 4, "--min-np", 2, "--max-np", 4, "--blacklist-cooldown-range", 1, 2)
    discovery = ("--host-discovery-script", f"cat {directory}/hosts")
    flags = ("--elastic", "--commit-every", 5, "--epochs", 100, "--fault-timeout", 6, "--output-dir", directory / "run")
    command = ("horovodrun", *ranks, *discovery, sys.executable, SCRIPT, request.param, directory, *FLAGS, *flags)
    mark = process_tree.new_mark()
    result = run(*command, timeout=900, **{process_tree.VARIABLE: mark})
    assert result.returncode == 0, result.output
    left = process_tree.marked(mark)
    process_tree.kill(mark)
    return request.param, directory / "run", result, left


def test_the_job_goes_on_with_whoever_is_there(job):
    """4 ranks, 2 after the kill, 4, 2 after the host has left, 4, 2 after the suspension, and 4; each new job resumes
    the newest commit."""
    _, _, result, left = job
    assert [line.split()[0] for line in _said(result, "ranks go on after step")] == ["2", "4", "2", "4", "2", "4"]
    assert not left


def test_a_frozen_rank_is_ended(job):
    assert len(_said(job[2], "was frozen for 6 s, and is ended")) == 1


def test_each_sample_counts_once_an_epoch_and_all_ends_in_the_bits_of_the_undisturbed_run(job, tmp_path):
    framework, directory, _, _ = job
    disturbed = events(directory)
    epochs = [event["epoch"] for event in disturbed if event["event"] == "epoch"]
    assert epochs == list(range(1, len(epochs) + 1))
    _assert_undisturbed(framework, directory, len(epochs), tmp_path)


def test_a_rank_that_starts_too_late_is_met_at_the_next_try_and_ctrl_c_saves(tmp_path):
    """Rank 0 waits for 3 s; rank 1 starts after 6 s."""
    late = ("bash", "-c", '[ "$HOROVOD_RANK" = 0 ] || sleep 6; exec "$@"', "late")
    ranks = ("-np", 2, "--min-np", 2, "--gloo-timeout-seconds", 3, "--host-discovery-script", "echo localhost:2")
    trainer = (sys.executable, "pytorch/train.py", *FLAGS, "--elastic", "--epochs", 1000, "--output-dir", tmp_path)
    with training(("horovodrun", *ranks, *late, *trainer), tmp_path, 2) as job:
        job.wait_for_step(3)
        job.signal_launcher(signal.SIGINT)
        status, printed = job.wait(60), job.printed()
        deadline = time.monotonic() + CLEAN_SECONDS
        while left := job.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    assert status == 128 + signal.SIGINT, printed
    assert "Wait timeout after 3 seconds" in printed
    assert [event["world_size"] for event in events(tmp_path) if event["event"] == "start"] == [2]
    stopped = r"rank 0 of 2 on \S+ stopped after step \d+ by SIGINT; resumable: --resume latest"
    assert len(re.findall(stopped, printed)) == 1, printed
    assert load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step == len(losses(events(tmp_path)))


@pytest.mark.parametrize("strategy", ["ddp", full("fsdp")])
def test_ranks_that_torchrun_starts_anew_go_on_from_the_newest_checkpoint(strategy, tmp_path):
    output_dir = tmp_path / "run"
    flags = ("--strategy", strategy, "--elastic", "--checkpoint-every", 10, "--output-dir", output_dir)
    launcher = ("torchrun", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    script = SCRIPT.with_name("elastic_torchrun.py")
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = run(*launcher, script, tmp_path, 26, *FLAGS, *flags, "--epochs", 1, **store)
    assert result.returncode == 0, result.output
    assert (tmp_path / "killed").exists()
    assert [event["world_size"] for event in events(output_dir) if event["event"] == "start"] == [2, 2]
    _assert_undisturbed("pytorch", output_dir, 1, tmp_path / "undisturbed")


def _assert_undisturbed(framework: str, output_dir: Path, num_epochs: int, undisturbed: Path) -> None:
    """Assert that each step was reported once, with the same bits as in an undisturbed run."""
    steps = [event["step"] for event in events(output_dir) if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    expected = train(framework, "alone", 1, undisturbed, *FLAGS, "--strategy", "single", "--epochs", num_epochs)
    assert losses(events(output_dir)) == losses(expected)
    last_step = f"checkpoints/step-{len(steps):08d}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (output_dir / last_step / name).read_bytes() == (undisturbed / last_step / name).read_bytes()


def _said(result: Result, words: str) -> list[str]:
    """Return the text after `allstep: ` in the lines with these words."""
    return [line.partition("allstep: ")[2] for line in result.stderr.splitlines() if words in line]
