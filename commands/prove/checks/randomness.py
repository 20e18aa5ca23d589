"""Do ranks draw different random numbers where they should, and keep one set of running statistics?"""

from __future__ import annotations

from collections.abc import Iterator

from allstep.commands.prove.checks.weights import differing
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.runs import Runs


def check(runs: Runs) -> Iterator[Finding]:
    """Compare random states in training, and running statistics in evaluation."""
    run = runs.together
    if run.num_ranks == 1:
        return
    for together in zip(*(rank.forwards(training=True) for rank in run.ranks), strict=False):
        states = [forward.random_state for forward in together]
        if states[0] is not None and len(set(states)) < len(states):
            same = [number for number, state in enumerate(states) if states.count(state) > 1]
            yield Finding(
                "dropout-same",
                "ranks draw the same random numbers in the model: dropout leaves out the same units on all of them",
                f"in step {together[0].step}, {ranks(same)} had the same random state, of which the model drew",
                _script_randomness(run.library),
                together[0].line,
            )
            break
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


def _script_randomness(library: str) -> str:
    if library == "horovod.tensorflow":
        return (
            "keras.utils.set_random_seed(seed + rank) before the model is made; and broadcast model.weights, for among "
            "model.variables are random states"
        )
    return "after the model is made: torch.manual_seed(seed + rank)"
