"""Check that ranks draw different random numbers where they should, and share one set of running statistics."""

from __future__ import annotations

from collections.abc import Iterator

from allstep.commands.prove.checks.weights import differing
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.records import Forward, Yielded
from allstep.commands.prove.runs import Rank, Run, Runs


def check(runs: Runs) -> Iterator[Finding]:
    """Compare random states in training, and running statistics in evaluation."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if (same := _same_draws(run)) and not same[0].by_library:
        forward, evidence = same
        yield Finding(
            "dropout-same",
            "ranks draw the same random numbers in the model: dropout leaves out the same units on all of them",
            evidence,
            _script_randomness(run.library),
            forward.line,
        )
    for together in zip(*(rank.forwards(training=False) for rank in run.ranks), strict=False):
        if names := differing([forward.batch_norm for forward in together]):
            yield Finding(
                "batch-norm-parts",
                "each rank has running statistics of its own samples: their validation is of different models, and the "
                "checkpoint has one rank's",
                f"in evaluation before step {together[0].step}, {listed(names)} have other values on other ranks",
                "average them over the ranks before validation, or use SyncBatchNorm; DistributedDataParallel sends "
                "rank 0's where broadcast_buffers is left on",
                together[0].line,
            )
            break


def may_be_same(runs: Runs) -> Iterator[str]:
    """Yield what draws the same random numbers on all ranks where a library seeds them so, or little depends on it."""
    run = runs.together
    if run.num_ranks == 1:
        return
    if (same := _same_draws(run)) and same[0].by_library:
        yield f"{same[1]} ({same[0].line}); right where a library seeds all ranks alike, else: torch.manual_seed(rank)"
    states = [_states_of_batches(rank) for rank in run.ranks[:2]]
    if any(one and one == other for own in zip(*states, strict=False) for one, other in zip(*own, strict=False)):
        line = run.ranks[0].training_loops[0].line
        yield (
            f"ranks 0 and 1 read batches ({line}) from the same random states, so that augmentation changes the "
            "samples of both alike; right where that is meant, else: seed each rank's generators with seed + rank"
        )


def _same_draws(run: Run) -> tuple[Forward, str] | None:
    """Return the first call in training in which ranks draw the same random numbers, and the evidence."""
    for together in zip(*(rank.forwards(training=True) for rank in run.ranks), strict=False):
        states = [forward.random_state for forward in together]
        if states[0] is not None and len(set(states)) < len(states):
            same = [number for number, state in enumerate(states) if states.count(state) > 1]
            evidence = f"in step {together[0].step}, {ranks(same)} had the same random state, of which the model drew"
            return together[0], evidence
    return None


def _states_of_batches(rank: Rank) -> list[tuple[str, ...]]:
    """Return the random states from which the first training loop read its batches, but the first, which seeds the
    order."""
    first = next((loop.number for loop in rank.training_loops), None)
    return [one.random_states for one in rank.all(Yielded) if one.loop == first][1:]


def _script_randomness(library: str) -> str:
    if library == "horovod.tensorflow":
        return (
            "keras.utils.set_random_seed(seed + rank) before the model is made; and broadcast model.weights, for among "
            "model.variables are random states"
        )
    return "after the model is made: torch.manual_seed(seed + rank)"
