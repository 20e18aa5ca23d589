"""Faults of all kinds, under all launchers, in both frameworks: the job ends, reports why once, and leaves no process.

Oracle: the contract of `commands/soak/faults.py` (ends within 15 s, one report, no process left 10 s later); for
checkpoints, an undisturbed run (the short form of `make soak`).
"""

from __future__ import annotations

import re
import signal
import time

import pytest
from ranks import full, run

from allstep.commands.parity.command import STEPS_PER_EPOCH
from allstep.commands.soak.faults import END_SECONDS, KINDS, REPORTED, InjectedFault, check_ended, faulty
from allstep.commands.soak.resume_check import training
from allstep.common.checkpoint import load

pytestmark = pytest.mark.launch

STEP = 6
FAULT_TIMEOUT = 9
QUICK = [
    ("a killed rank", "horovodrun-mpi", "tensorflow"),
    ("a rank that raises", "mpirun", "pytorch"),
    ("a rank that leaves a collective out", "horovodrun-mpi", "pytorch"),
    ("SIGTERM to the launcher", "horovodrun-gloo", "pytorch"),
    ("SIGINT to the launcher", "horovodrun-mpi", "pytorch"),
    ("SIGKILL to the launcher", "mpirun", "tensorflow"),
    ("SIGTERM to all ranks", "mpirun", "pytorch"),
    ("SIGUSR1 to a rank", "torchrun", "pytorch"),
]
LAUNCHERS = {
    "pytorch": ("horovodrun-mpi", "horovodrun-gloo", "mpirun", "torchrun"),
    "tensorflow": ("horovodrun-mpi", "horovodrun-gloo", "mpirun"),  # no strategy of TensorFlow runs under torchrun
}


REST = [
    (kind, launcher, framework)
    for framework, launchers in LAUNCHERS.items()
    for launcher in launchers
    for kind in KINDS
    if (kind, launcher, framework) not in QUICK
]


def case(kind: str, launcher: str, framework: str, *marks: pytest.MarkDecorator) -> object:
    """Return a case, in which a fork cannot see that its client's parent has ended."""
    start = (pytest.mark.cold,) if kind == "SIGKILL to the launcher" else ()
    return pytest.param(kind, launcher, framework, marks=(*start, *marks))


def disturbed(kind: str, launcher: str, framework: str, output_dir, *, rank: int = 1) -> str:
    """Run a job with a fault, check how it ends, and return its output."""
    fault = InjectedFault(kind, rank, STEP)
    flags = ("--checkpoint-every", 4, "--epochs", 1000)
    with training(framework, 2, output_dir, *flags, launcher=launcher, program=fault.program(framework, 1)) as job:
        if not KINDS[kind].program:
            job.wait_for_step(STEP)
            wait_for_a_checkpoint(output_dir)
        assert fault.strike(job), job.printed()
        check_ended(job, KINDS[kind])
        return job.printed()


def wait_for_a_checkpoint(output_dir) -> None:
    """Wait for the first checkpoint, which is written in the background."""
    deadline = time.monotonic() + 60
    while not list(output_dir.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "launcher", "framework"), [*(case(*of) for of in QUICK), *(case(*of, pytest.mark.full) for of in REST)]
)
def test_ends_and_says_why(kind, launcher, framework, tmp_path):
    output = disturbed(kind, launcher, framework, tmp_path)
    if kind == "a rank stuck in the input":
        assert re.search(r"rank 0 on \S+ waits in step 6 for .*conv1\.weight", output), output
    # The newest checkpoint is intact; after a signal to stop, it is from the last step.
    state = load("latest", tmp_path / "checkpoints", warn=pytest.fail)
    if found := re.search(r"stopped after step (\d+) by", output):
        assert state.progress.step == int(found[1])


@pytest.mark.parametrize("rank", [0, full(1)])
def test_a_killed_rank_is_named(rank, tmp_path):
    """Rank 0 reports other ranks; another rank reports rank 0."""
    output = disturbed("a killed rank", "mpirun", "pytorch", tmp_path, rank=rank)
    assert re.search(rf"rank {rank} of 2 on \S+ stopped at step \d+: gone without a word", output), output


@pytest.mark.parametrize(
    ("rank", "launcher", "framework"),
    [
        (0, "mpirun", "pytorch"),
        *(
            full(*of)
            for of in [
                (0, "horovodrun-gloo", "tensorflow"),
                (0, "torchrun", "pytorch"),
                (1, "mpirun", "tensorflow"),
                (1, "horovodrun-gloo", "pytorch"),
            ]
        ),
    ],
)
def test_a_rank_that_is_killed_after_the_last_epoch_is_named(rank, launcher, framework, tmp_path):
    """The other rank is done before, and waits until all ranks are."""
    program = faulty(framework, "lingers", rank, 0)
    with training(framework, 2, tmp_path, "--epochs", 1, launcher=launcher, program=program) as job:
        while not job.reported_its_end():
            assert job.status is None, job.printed()
            time.sleep(0.1)
        time.sleep(2)  # the other rank is also done
        assert job.signal_rank(rank, signal.SIGKILL), job.printed()
        assert job.process.wait(END_SECONDS) != 0
        output = job.printed()
    assert len(REPORTED.findall(output)) == 1, output
    assert re.search(rf"rank {rank} of 2 on \S+ stopped at step {STEPS_PER_EPOCH}: gone without a word", output), output


def test_a_stall_report_has_tensors_ranks_and_stack(tmp_path):
    output = disturbed("a rank stuck in the input", "mpirun", "pytorch", tmp_path)
    assert re.search(r"rank 1 of 2 on \S+ stopped at step 6: stuck for \d+ s in reading the input of step 6", output)
    assert re.search(r"rank 0 on \S+ waits in step 6 for .*conv1\.weight", output), output
    assert re.search(r"rank 1 on \S+ is missing; its Python stack", output) and "time.sleep" in output, output


def test_a_rank_that_raises_while_it_writes_is_not_stuck(tmp_path):
    """The disk takes longer than --stall-timeout for a checkpoint, which is complete before the rank ends."""
    program = faulty("pytorch", "raises-writing", 0, STEP)
    with training("pytorch", 2, tmp_path, "--checkpoint-every", 4, program=program) as job:
        assert job.process.wait(180) != 0, job.printed()
        output = job.printed()
    assert len(REPORTED.findall(output)) == 1 and "stuck" not in output, output
    assert re.search(rf"rank 0 of 2 on \S+ stopped: step {STEP} failed: .*lost the disk", output), output
    assert load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step == 4


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_a_rank_that_hangs_in_its_first_step_is_named(framework, tmp_path):
    """The other rank has completed its first step, so the reason is not compilation."""
    program = faulty(framework, "hangs", 1, 1)
    with training(framework, 2, tmp_path, program=program) as job:
        assert job.process.wait(180) != 0, job.printed()
        output = job.printed()
    assert re.search(r"rank 1 of 2 on \S+ stopped at step 1: stuck for \d+ s in step 1", output), output
    assert re.search(r"rank 0 on \S+ waits in the replica check after step 1 for the all-gather", output), output


@pytest.mark.full
@pytest.mark.cold  # a fork does not stop with its client
def test_a_frozen_rank_is_lost_and_not_stuck(tmp_path):
    """A suspended rank, like a disconnected host, counts as lost only after more than --stall-timeout of silence."""
    with training(
        "pytorch", 2, tmp_path, "--epochs", 1000, "--fault-timeout", FAULT_TIMEOUT, launcher="horovodrun-gloo"
    ) as job:
        job.wait_for_step(STEP)
        assert job.signal_rank(1, signal.SIGSTOP), job.printed()
        assert job.process.wait(FAULT_TIMEOUT + END_SECONDS) != 0
        output = job.printed()
    assert len(REPORTED.findall(output)) == 1, output
    assert re.search(r"rank 1 of 2 on \S+ stopped at step \d+: not heard of for 6 s", output), output


@pytest.mark.full
@pytest.mark.cold
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_suspended_job_goes_on_when_it_is_continued(framework, tmp_path):
    """A scheduler suspends all ranks for longer than --fault-timeout."""
    flags = ("--epochs", 1000, "--fault-timeout", 4)
    with training(framework, 2, tmp_path, *flags, launcher="horovodrun-gloo") as job:
        job.wait_for_step(STEP)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            assert all(job.signal_rank(rank, number) for rank in range(2)), job.printed()
            time.sleep(5)
        assert job.process.poll() is None, job.printed()
        assert job.signal_rank(0, signal.SIGTERM)
        assert job.process.wait(60) == 0 and "resumable" in job.printed(), job.printed()


@pytest.mark.full
@pytest.mark.cold
@pytest.mark.parametrize(("rank", "reported_by"), [(2, 0), (0, 1)])
def test_a_frozen_rank_of_a_parameter_server_is_named(rank, reported_by, tmp_path):
    """The kernel still accepts connections for the suspended rank, so the others would wait forever.

    TensorFlow may wait for a worker with the interpreter's lock; then its own watcher ends it, and the chief goes on.
    """
    flags = ("--epochs", 10_000, "--fault-timeout", FAULT_TIMEOUT)
    start = training("tensorflow", 3, tmp_path, *flags, launcher="horovodrun-gloo", strategy="parameter-server")
    with start as job:
        job.wait_for_step(STEP)
        assert job.signal_rank(rank, signal.SIGSTOP), job.printed()
        assert job.process.wait(FAULT_TIMEOUT + END_SECONDS) != 0
        output = job.printed()
    assert len(REPORTED.findall(output)) == 1, output
    role = "chief" if rank == 0 else f"worker {rank - 1}"
    words = rf"rank {reported_by} of 3 on \S+ stopped: rank {rank} \({role} at \S+\) "
    found = re.search(words + "(does not answer; it is frozen|is gone; it was killed)", output)
    assert found and (found[1].endswith("frozen") or re.search(r"rank \d of 3 on \S+ was frozen for 9 s", output)), (
        output
    )


@pytest.mark.parametrize("faults", [1, full(4)])
def test_goes_on_exactly_after_any_fault(faults):
    """Run the short form of `make soak`."""
    result = run("allstep", "soak", "--kills", "0", "--faults", str(faults), "--seed", "5", timeout=300)
    assert result.returncode == 0, result.output
    assert f" {faults} faults; 0 violations" in result.stdout, result.output
