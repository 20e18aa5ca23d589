"""Compiled steps in real launches: curves, numbers of compiled programs, and strategies that refuse --compile.

Oracle: a run of `single` without --compile, in the same framework.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import HOROVODRUN_GLOO, MPIRUN, Job
from ranks import events, full, last, run

from allstep.commands.parity.curves import Curve, Difference, apart, read_curve
from allstep.common.catalog.strategies import STRATEGIES

# 2 epochs of 25 steps, as in parity; the last batch of an epoch is smaller, and both sizes are odd.
FLAGS = ("--global-batch-size", 59, "--base-lr", 0.05, "--seed", 1, "--epochs", 2, "--log-every", 1,
         "--checkpoint-every", 10, "--keep-checkpoints", 9)  # fmt: skip
BOUND = 1e-5
NUM_SIZES = 2

# Trainer that prints how many programs a rank has compiled; in TensorFlow, how often it has traced a step, of which XLA
# compiles a program for each shape.
TRAINER = """
from allstep.common.training.hooks import Hook
from allstep.common.process.exit import run_rank
from allstep.{framework} import train
class Counts(Hook):
    def on_end(self, session):
        print(f"programs: {{{count}}}", flush=True)  # in one part, which no other rank's output comes into
run_rank(lambda: train.main(hooks=[Counts()]))
"""
COUNTS = {
    "pytorch": "__import__('torch')._dynamo.utils.counters['stats']['unique_graphs']",
    "tensorflow": "session.worker._step.backward.one_pass.experimental_get_tracing_count()",
}

JOBS = {
    ("pytorch", "horovod"): Job(("horovod",), (*HOROVODRUN_GLOO, 2)),
    ("pytorch", "ddp"): Job(("ddp",), ("torchrun", "--nproc-per-node", 2)),
    ("pytorch", "fsdp"): Job(("fsdp",), ("torchrun", "--nproc-per-node", 2)),
    ("tensorflow", "horovod"): Job(("horovod",), (*MPIRUN, 2)),
    ("tensorflow", "mirrored"): Job(("mirrored", "--num-devices", 2)),
    ("tensorflow", "multi-worker-mirrored"): Job(("multi-worker-mirrored",), (*HOROVODRUN_GLOO, 2)),
}
# Programs per network, or per layer with weights for FSDP; in TensorFlow, per device.
PROGRAMS = {**dict.fromkeys(JOBS, NUM_SIZES), ("pytorch", "fsdp"): 4 * NUM_SIZES, ("tensorflow", "horovod"): 1,
            ("tensorflow", "mirrored"): 2, ("tensorflow", "multi-worker-mirrored"): 1}  # fmt: skip


@functools.cache
def reference(framework: str, model: str) -> Curve:
    with tempfile.TemporaryDirectory() as output_dir:
        result = run(sys.executable, f"{framework}/train.py", *FLAGS, "--model", model, "--output-dir", output_dir)
        assert result.returncode == 0, result.output
        return read_curve(Path(output_dir), 50)


def train_compiled(framework: str, model: str, job: Job, folder: Path) -> tuple[Curve, list[dict], set[int]]:
    """Train, and return the curve, the events, and the numbers of programs that ranks print."""
    script = folder / "trainer.py"
    script.write_text(TRAINER.format(framework=framework, count=COUNTS[framework]))
    start = job.launcher if "torchrun" in job.launcher else (*job.launcher, sys.executable)
    flags = ("--model", model, "--compile", "--strategy", *job.flags, "--output-dir", folder / "run")
    result = run(*start, script, *FLAGS, *flags, timeout=500)
    assert result.returncode == 0, result.output
    num_programs = {int(number) for number in re.findall(r"programs: (\d+)", result.stdout)}
    return read_curve(folder / "run", 50), events(folder / "run"), num_programs


def largest(differences: dict[int, Difference]) -> float:
    return max(max(one.loss, one.weights) for one in differences.values())


# PyTorch takes a minute to compile convolutions, so cnn is `full`.
@pytest.mark.parametrize(
    ("framework", "strategy", "model"),
    [("pytorch", "horovod", "mlp"), ("tensorflow", "horovod", "mlp"), *(full(*names, "cnn") for names in JOBS)],
)
def test_same_curve_as_without(framework, strategy, model, tmp_path):
    """Train on 2 ranks or devices; a step is compiled once for each batch size, and validation is not compiled."""
    curve, reported, num_programs = train_compiled(framework, model, JOBS[framework, strategy], tmp_path)
    assert largest(apart(reference(framework, model), curve)) <= BOUND
    assert num_programs == {PROGRAMS[framework, strategy]}
    assert last(reported, "epoch")["compile_seconds"] > 0


@pytest.mark.full
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_same_curve_in_passes(framework, tmp_path):
    """Passes have 3, 4, 9 or 10 samples; `single` computes whole batches."""
    job = Job(("horovod", "--accumulate-steps", 3), (*HOROVODRUN_GLOO, 2))
    curve, _, _ = train_compiled(framework, "cnn", job, tmp_path)
    assert largest(apart(reference(framework, "cnn"), curve)) <= BOUND


REFUSING = [
    (framework, name)
    for framework, entries in STRATEGIES.items()
    for name, entry in entries.items()
    if "compile" not in entry.flags
]


@pytest.mark.parametrize(("framework", "strategy"), REFUSING)
def test_who_cannot_compile_says_why(framework, strategy):
    result = run(sys.executable, f"{framework}/train.py", "--strategy", strategy, "--compile")
    assert result.returncode == 2, result.output
    assert result.stderr.count("\n") == 1 and "expected --compile with --strategy horovod or " in result.stderr
    assert f"--strategy {strategy} in " in result.stderr and STRATEGIES[framework][strategy].why_not_compiled


def test_every_other_strategy_is_tested():
    assert set(REFUSING) | set(JOBS) | {(framework, "single") for framework in STRATEGIES} == {
        (framework, name) for framework, entries in STRATEGIES.items() for name in entries
    }


def test_a_missing_compiler_is_told_before_anything_is_trained():
    result = run(sys.executable, "pytorch/train.py", "--compile", CXX="no-such-compiler")
    assert result.returncode == 2, result.output
    assert result.stderr.count("\n") == 1 and "received no no-such-compiler" in result.stderr
