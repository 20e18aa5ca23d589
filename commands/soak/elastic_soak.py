"""Check that an elastic job that loses ranks and hosts neither loses nor repeats a sample: `allstep soak --elastic`.

Four ranks on two hosts train under `horovodrun --min-np 2`, or under two agents of torchrun. Whenever all four are
running, one of them is killed or suspended, a host leaves and returns, or a host is cut off for a while. When the
given minutes are over, the job is asked to stop. The following must hold:

    metrics.jsonl has every step of every epoch once, with the losses of an undisturbed run of one rank
    weights and optimizer state have the bits of that run
    no process is left, and the job never stalled for more than two minutes

It reports the effective training time ratio (time in steps that counted over total time, Jiang et al. 2024, section 6),
the time from each mishap to the next step, and the time from the return of a host until its ranks took part.
"""

import random
import statistics
import time
from pathlib import Path

from allstep.commands.shared.jobs import scratch_folder
from allstep.commands.shared.records.runs import FILE, Events, read_events
from allstep.commands.soak.elastic_job import Hosts, disturb, elastic_job, torchrun_job
from allstep.commands.soak.faults import Violation
from allstep.commands.soak.training import training
from allstep.common.base.progress_bar import ProgressBar

FAULT_SECONDS = 6
FLAGS = ("--model", "mlp", "--global-batch-size", 32, "--base-lr", 0.001, "--log-every", 1, "--slices", 4)


def soak(framework: str, strategy: str, minutes: float, chance: random.Random, hosts: Hosts) -> None:
    """Disturb one job for the given minutes, check it and print how long it took to recover.

    `hosts` are those of a horovodrun job; torchrun's agents run on this machine. Raises Violation if a check failed.
    """
    program = f"allstep.{framework}.train"
    flags = (*FLAGS, "--elastic", "--strategy", strategy, "--epochs", 100_000, "--fault-timeout", FAULT_SECONDS)
    with scratch_folder("soak") as directory:
        started = time.monotonic()
        if strategy == "horovod":
            disturbed = elastic_job(program, hosts, directory, *flags, "--commit-every", 10)
        else:
            disturbed = torchrun_job(program, directory, *flags, "--checkpoint-every", 10)
        with disturbed as job, ProgressBar(60 * minutes) as progress:
            progress.begin(f"disturbing {framework}, {strategy} for {minutes:g} minutes")
            seconds = disturb(job, hosts.mishaps, started + 60 * minutes, chance, progress)
            job.stop()
            total = time.monotonic() - started
        events = read_events(directory / "run" / FILE)
        num_epochs, num_steps = check_steps(events)
        check_bits(program, directory, num_epochs, num_steps)
        useful = max(epoch.cumulative_seconds for epoch in events.epochs)
        num_mishaps = sum(len(each) for mishap, each in seconds.items() if mishap in hosts.mishaps)
        print(
            f"{framework}, {strategy}: {num_mishaps} mishaps, {num_steps} steps of {num_epochs} epochs, none lost or "
            f"doubled; equal bits; effective training time ratio {useful / total:.2f}"
        )
        for what, each in sorted(seconds.items()):
            median, worst = statistics.median(each), max(each)
            print(f"    {what}: {len(each)}, {median:.1f} s (median), {worst:.1f} s (worst)", flush=True)


def check_steps(events: Events) -> tuple[int, int]:
    """Return the numbers of epochs and steps. Raises Violation unless each is there once and in order."""
    steps, epochs = [event.step for event in events.steps], [event.epoch for event in events.epochs]
    for kind, numbers in (("step", steps), ("epoch", epochs)):
        if numbers != list(range(1, len(numbers) + 1)):
            raise Violation(f"expected each {kind} once and in order, received {numbers}")
    return len(epochs), len(steps)


def check_bits(program: str, directory: Path, num_epochs: int, num_steps: int) -> None:
    """Compare losses, weights and optimizer state with those of an undisturbed run on one rank.

    Raises Violation if they differ.
    """
    run, undisturbed = directory / "run", directory / "undisturbed"
    command = [
        *("python", "-m", program, "--strategy", "single", *FLAGS, "--epochs", num_epochs + 1),
        *("--checkpoint-every", num_steps, "--output-dir", undisturbed),
    ]
    with training(command, undisturbed, 1) as job:
        if job.wait(3600):
            raise Violation(f"the undisturbed run failed: {job.printed()}")
    losses, expected = (
        {event.step: event.loss for event in read_events(path / FILE).steps} for path in (run, undisturbed)
    )
    for step, loss in losses.items():
        if loss != expected[step]:
            raise Violation(f"expected a loss of {expected[step]} at step {step}, received {loss}")
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = Path("checkpoints", f"step-{num_steps:08d}", name)
        if (run / file).read_bytes() != (undisturbed / file).read_bytes():
            raise Violation(f"expected the bits of the undisturbed run in {file}, received others")
