"""Strategies of TensorFlow in real launches. Oracle: a run of `single` with the same global batch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from jobs import (
    HOROVODRUN_GLOO,
    MPIRUN,
    Job,
    assert_same_curve,
    assert_same_weights,
    broken,
    losses,
)
from ranks import REPOSITORY, environment, free_port, full, last, run
from ranks import events as read_events

from allstep.tensorflow.strategies import STRATEGIES, multi_worker_mirrored

# 2 epochs of 26 steps. Slices are uneven, and an epoch's last batch has a single sample.
FLAGS = ("--dataset", "synthetic", "--synthetic-samples", 1426, "--synthetic-shape", 8, 8, 1, "--global-batch-size", 57,
         "--epochs", 2, "--log-every", 1)  # fmt: skip
SCRIPTS = Path(__file__).parent / "ranks"


JOBS = {
    "horovod, 3 passes": Job(("horovod", "--accumulate-steps", 3), (*MPIRUN, 2), resumes=True),
    "mirrored": Job(("mirrored", "--num-devices", 3)),
    "central-storage, 2 passes": Job(
        ("central-storage", "--num-devices", 2, "--accumulate-steps", 2), resumes=True),
    "multi-worker-mirrored under horovodrun": Job(("multi-worker-mirrored",), (*HOROVODRUN_GLOO, 2)),
    "multi-worker-mirrored under mpirun": Job(
        ("multi-worker-mirrored", "--communication", "ring"), (*MPIRUN, 3), resumes=True),
    "parameter-server of one worker, each on one core": Job(
        ("parameter-server",), ("mpirun", "--bind-to", "core", "-np", 2), resumes=True),
}  # fmt: skip


def train(output_dir: Path, *flags: str | int | Path, launcher: tuple[str | int, ...] = ()) -> list[dict]:
    result = run(*launcher, sys.executable, "tensorflow/train.py", *flags, "--output-dir", output_dir)
    assert result.returncode == 0, result.output
    assert "Traceback" not in result.output and "ERROR" not in result.output, result.output
    return read_events(output_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, list[dict]]:
    output_dir = tmp_path_factory.mktemp("single")
    return output_dir, train(output_dir, *FLAGS, "--strategy", "single", "--checkpoint-every", 20)


@pytest.mark.parametrize("name", [full(name) if name.endswith("under mpirun") else name for name in JOBS])
def test_same_curve_as_single(name, reference, tmp_path):
    """Compare losses, validation, weights and slots, from the start or from the middle of an epoch."""
    job, (expected_dir, expected) = JOBS[name], reference
    resumed = ("--resume", expected_dir / "checkpoints" / "step-00000040") if job.resumes else ()
    events = train(tmp_path, *FLAGS, "--strategy", *job.flags, *resumed, launcher=job.launcher)
    assert_same_curve(events, expected, first_step=41 if job.resumes else 1)
    assert_same_weights(tmp_path, expected_dir, 52)
    start = last(events, "start")
    assert (start["strategy"], start["world_size"]) == (job.flags[0], job.launcher[-1] if job.launcher else 1)
    if job.flags[0] == "parameter-server":  # only one worker updates the weights
        assert (last(events, "end")["staleness_mean"], last(events, "end")["staleness_max"]) == (0, 0)


def test_asynchronous_updates_are_stale(tmp_path):
    """Two workers train on each sample once, and the staleness of their gradients is reported."""
    flags = (*FLAGS, "--strategy", "parameter-server", "--checkpoint-every", 20)
    events = train(tmp_path / "1", *flags, launcher=(*HOROVODRUN_GLOO, 3))
    assert list(losses(events)) == list(range(1, 53))
    assert last(events, "epoch")["validation_samples"] > 0
    for name in ("epoch", "end"):
        assert 0 < last(events, name)["staleness_mean"] <= last(events, name)["staleness_max"] <= 51
    # The checkpoint in mid-epoch has exactly 40 updates, so `single` resumes from it with the same samples.
    resumed = train(tmp_path / "2", *FLAGS, "--resume", tmp_path / "1" / "checkpoints" / "step-00000040")
    assert list(losses(resumed)) == list(range(41, 53))


@pytest.mark.parametrize(
    ("num_devices", "expected"), [(1, "1 1"), full(2, f"1 {min(2, len(os.sched_getaffinity(0)))}")]
)
def test_operations_side_by_side_take_no_more_than_the_share_of_cores(num_devices, expected):
    """A rank with one thread uses one core even if others are idle, so that a measured rank is one core."""
    code = f"""
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import ALONE
from allstep.common.process.lean_import import lean_import
with lean_import():
    import tensorflow as tf
    from allstep.tensorflow.strategies.distribute import Mirrored
Mirrored(ALONE, StrategyConfig(num_devices={num_devices})).pin_device()
threads = tf.config.threading
print(threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads())
"""
    assert run(sys.executable, "-c", code).stdout == f"{expected}\n"


def test_devices_of_one_process():
    """Test all optimizers under mirrored and central-storage, and the replica check of devices."""
    result = run(sys.executable, SCRIPTS / "lean.py", SCRIPTS / "devices.py")
    assert result.stdout == "all right\n", result.output


def test_flags_of_horovod():
    result = run(*MPIRUN, 2, sys.executable, SCRIPTS / "lean.py", SCRIPTS / "horovod_flags.py")
    assert result.stdout.count("all right") == 2, result.output


def processes(*flags: str, environments: list[dict[str, str]]) -> list[subprocess.Popen]:
    command = [sys.executable, "tensorflow/train.py", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, cwd=REPOSITORY, env=environment(**one), **pipes) for one in environments]


def outcomes(started: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return exit status, standard output and standard error of each process."""
    try:
        return [(process.wait(), *texts) for process in started if (texts := process.communicate(timeout=300))]
    finally:
        for process in started:
            process.kill()


def tf_configs(**sizes: int) -> list[dict[str, str]]:
    """Return TF_CONFIG for each process of a cluster, given the number of processes per role."""
    cluster = {role: [f"127.0.0.1:{free_port()}" for _ in range(size)] for role, size in sizes.items()}
    tasks = [{"type": role, "index": index} for role, size in sizes.items() for index in range(size)]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def test_a_dead_worker_ends_the_job_and_is_named():
    """Start a cluster by TF_CONFIG, without a launcher that supervises the processes."""
    flags = ("--strategy", "parameter-server", "--epochs", "10000")
    cluster = processes(*flags, environments=tf_configs(chief=1, ps=1, worker=1))
    assert cluster[0].stdout.readline().startswith("Epoch =  1:")
    cluster[2].send_signal(signal.SIGKILL)
    [(status, _, stderr), *servers] = outcomes(cluster)
    assert status == 1
    assert re.findall("rank 0 of 3 on .* stopped: rank 2 .worker 0 at 127.0.0.1:[0-9]+. is gone", stderr), stderr
    assert [status for status, *_ in servers] == [0, -signal.SIGKILL]


@pytest.mark.full
def test_a_dead_worker_under_a_launcher(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(f"""
import os, signal, threading
from allstep.common.process.exit import run_rank
from allstep.common.launch.placement import find_placement
from allstep.tensorflow import train
if find_placement().rank == 2:
    def die():
        while not os.path.exists({str(tmp_path / "out" / "metrics.jsonl")!r}):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die, daemon=True).start()
run_rank(train.main)
""")
    flags = ("--strategy", "parameter-server", "--epochs", "10000", "--output-dir", tmp_path / "out")
    result = run(*MPIRUN, 3, sys.executable, script, *flags)
    assert result.returncode not in (0, 2), result.output
    assert "rank 2 (worker 1 at" in result.output or "process rank 2 with PID" in result.output, result.output


def test_a_chief_that_waits_with_the_interpreter_lock_is_ended(tmp_path):
    """TensorFlow's coordinator does so where the host of a worker is cut off while it sends a step there."""
    script = tmp_path / "waits.py"
    script.write_text("""
import ctypes, sys
from allstep import Hook
from allstep.common.process.exit import run_rank
from allstep.tensorflow import train
class Waits(Hook):
    def on_epoch(self, session):
        ctypes.PyDLL(None).sleep(600)
run_rank(lambda: train.main(sys.argv[1:], [Waits()]))
""")
    flags = (*FLAGS, "--strategy", "parameter-server", "--fault-timeout", 6, "--output-dir", tmp_path / "out")
    result = run(*MPIRUN, 2, sys.executable, script, *flags)
    told = r"allstep: rank 0 of 2 on \S+, or a host that it waits for, was frozen for 12 s, and is ended"
    assert result.returncode not in (0, 2) and re.search(told, result.output), result.output


def test_a_session_of_parameter_server_is_the_only_one_of_its_process(tmp_path):
    """Only the chief's program goes on after `fit`."""
    script = tmp_path / "two.py"
    script.write_text("""
import numpy as np
from allstep.tensorflow import Session
import keras
def build(input_shape, num_classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_classes)])
x, y = np.random.default_rng(0).normal(size=(64, 4)).astype("float32"), np.arange(64) % 3
for _ in range(2):
    history = Session(build, (x, y), (x, y), epochs=2, batch_size=16, strategy="parameter-server").fit()
    print("epochs:", len(history))
""")
    result = run(*MPIRUN, 2, sys.executable, script)
    assert result.returncode == 2 and re.findall(r"epochs: .*", result.stdout) == ["epochs: 2"], result.output
    assert "one Session with parameter-server in a process" in result.stderr, result.output


DRIFTS = "bias = worker._model.trainable_variables[1]; bias.assign(bias.value.numpy() + 1e-6)"


def test_a_rank_that_drifts_is_told_once(tmp_path):
    script = broken("tensorflow", DRIFTS, tmp_path)
    result = run(*HOROVODRUN_GLOO, 2, sys.executable, script, "--strategy", "multi-worker-mirrored")
    assert result.returncode == 1, result.output
    expected = "out of step after step 1: the weights of rank 1 differ from those of rank 0, first in conv1.bias"
    assert result.output.count(" stopped: ") == result.output.count(expected) == 1, result.output


def test_a_process_makes_one_strategy_of_several_workers(monkeypatch):
    """A second Session would restart the server, to which the other ranks may be speaking by then."""
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda **_: object())
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    assert multi_worker_mirrored._strategy(ring) is multi_worker_mirrored._strategy(ring)
    multi_worker_mirrored._strategy.cache_clear()


ONE_WORKER = '{"cluster": {"worker": ["localhost:2222"]}, "task": {"type": "worker", "index": 0}}'
REFUSED = {
    "mirrored under 2 ranks": ((*MPIRUN, 2), ("mirrored",), "", "one process for --strategy mirrored"),
    "parameter server alone": ((), ("parameter-server",), "", "at least two processes for --strategy parameter-server"),
    "batch norm in a loop": (
        (),
        ("central-storage", "--model", "resnet18", "--accumulate-steps", "2"),
        "",
        "--accumulate-steps 1 for batch norm",
    ),
    "nccl without GPUs": ((*MPIRUN, 2), ("multi-worker-mirrored", "--communication", "nccl"), "", "expected a GPU"),
    "TF_CONFIG is no JSON": ((), ("multi-worker-mirrored",), "{worker}", "expected JSON in TF_CONFIG"),
    "TF_CONFIG and mpirun disagree": ((*MPIRUN, 2), ("multi-worker-mirrored",), ONE_WORKER, "TF_CONFIG to say rank"),
    "TF_CONFIG without a server": ((), ("parameter-server",), ONE_WORKER, "received no chief"),
    "a strategy of PyTorch": ((), ("ddp",), "", "a strategy of PyTorch: start python pytorch/train.py for it"),
    "a flag of PyTorch": ((), ("horovod", "--comm-hook", "bf16"), "", "--comm-hook with PyTorch alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    launcher, flags, tf_config, expected = REFUSED[name]
    extra = {"TF_CONFIG": tf_config} if tf_config else {}
    result = run(*launcher, sys.executable, "tensorflow/train.py", "--strategy", *flags, **extra)
    assert result.output.count("allstep: error: ") == 1 and expected in result.output, result.output
    assert 'Traceback (most recent call last):\n  File "/' not in result.stderr or "horovod/runner" in result.stderr
    if launcher[:1] != ("horovodrun",):  # it returns status 1 for a failed rank under Gloo
        assert result.returncode == 2, result.output


def test_list_strategies():
    result = run(sys.executable, "tensorflow/train.py", "--list-strategies")
    assert result.returncode == 0, result.output
    listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert tuple(listed) == STRATEGIES
    assert set(listed.values()) == {"available"}


def test_example_of_fit_under_mirrored_strategy():
    result = run(sys.executable, "examples/keras_fit_mirrored.py")
    assert result.returncode == 0, result.output
    [accuracy] = re.findall(r"validation accuracy: (\d\.\d+)", result.stdout)
    assert float(accuracy) >= 0.85
