"""Check that all ranks start from the same weights and the same state of the optimizer, and stay in sync."""

from collections.abc import Iterator, Mapping, Sequence

from allstep.commands.prove.findings import Finding, listed
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import AVERAGES_WEIGHTS, TENSOR_PARALLEL, UNNAMED, Collective, Step
from allstep.commands.prove.runs import Run, Runs
from allstep.common.exact.replica_check import OUT_OF_STEP

BROADCASTS = {
    "horovod.tensorflow": "hvd.callbacks.BroadcastGlobalVariablesCallback(0) among the callbacks of fit; in a loop, "
    "after its first step, hvd.broadcast_variables(model.weights, root_rank=0), and the optimizer's variables",
    "horovod": "before the first step: hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    "tf.distribute": "make the model under strategy.scope()",
}
"""Call that gives all ranks the weights of rank 0, by library."""
_BY_WRAPPER = "before the first step: model = DistributedDataParallel(model), which sends rank 0's weights to all ranks"
_AT_ONCE = tuple(f"{OUT_OF_STEP} {moment}" for moment in ("after batch 1", "before the second step"))
"""Errors of the Keras drop-in, which ends a fit, or a loop, before the observed weights can be compared."""


def check(runs: Runs) -> Iterator[Finding]:
    """Compare digests of weights and slots before the first step."""
    if any(error in runs.together.failure for error in _AT_ONCE):
        steps = next(iter(runs.together.steps(1)), ())
        yield _apart(runs.together, runs.together.failure, steps[0].line if steps else "")
        return
    for optimizer in range(1, runs.together.num_optimizers + 1):
        if has_shards(runs.together, optimizer):
            continue
        pairs = ((steps, parted(runs.together, steps)) for steps in runs.together.steps(optimizer) if steps[0].weights)
        first, names = next(((steps, names) for steps, names in pairs if names is not None), (None, None))
        if first is None:
            continue
        if names:
            which = f"{listed(names)} of {len(first[0].weights)} weights"
            evidence = f"before step {first[0].number}, {which} have other values on other ranks"
            yield _apart(runs.together, evidence, first[0].line)
        elif names := differing([step.state for step in first]):
            yield Finding(
                "optimizer-state-differs",
                "ranks start from different states of the optimizer, so that equal gradients move weights apart",
                f"before step 1, {listed(names)} have other values on other ranks, or are on some ranks only",
                "hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it is loaded"
                if "horovod" in runs.together.library
                else "load the optimizer's state on every rank",
                first[0].line,
            )


def _apart(run: Run, evidence: str, line: str) -> Finding:
    what = "ranks start from different weights, so that they train different models"
    return Finding("weights-differ", what, evidence, BROADCASTS.get(run.library, _BY_WRAPPER), line)


def check_later(runs: Runs) -> Iterator[Finding]:
    """Compare weights again at the last observed step of the first epoch."""
    if runs.together.has(AVERAGES_WEIGHTS):
        return
    for optimizer in range(1, runs.together.num_optimizers + 1):
        if has_shards(runs.together, optimizer):
            if not runs.together.shares_work:
                yield from _left_behind(runs.together, optimizer)
            continue
        if rejoins(runs.together, optimizer):
            continue
        mend = "change weights on all ranks alike: by averaged gradients, and by loads on every rank"
        if runs.together.joins:
            mend = (
                "after a join, send weights and the optimizer's state from the rank that joined last, which alone has "
                "taken all steps"
            )
        for steps in runs.together.steps(optimizer):
            if names := parted(runs.together, steps):
                yield Finding(
                    "weights-part",
                    "ranks have started from the same weights, and no longer have the same",
                    f"before step {steps[0].number}, {listed(names)} have other values on other ranks",
                    mend,
                    steps[0].line,
                )
                return


def _left_behind(run: Run, optimizer: int) -> Iterator[Finding]:
    """Find weights that a rank has stepped, as its share, and that other ranks' models do not get."""
    first: set[str] | None = None
    for steps in run.steps(optimizer):
        known = [{**step.others, **step.weights} for step in steps]
        apart = {*differing([{name: own[name] for name in set.intersection(*map(set, known))} for own in known])}
        first = apart if first is None else first
        if names := sorted(apart - first):
            yield Finding(
                "weights-part",
                "each rank steps a share of the weights, and others keep the old ones",
                f"before step {steps[0].number}, {listed(names)} have other values on other ranks",
                "after each step, send each weight from the rank that steps it: dist.broadcast(weight, src=rank)",
                steps[0].line,
            )
            return


def has_shards(run: Run, optimizer: int) -> bool:
    """Return whether a script gives each rank weights of its own to step, as a ZeRO written by hand does.

    They are other weights of a model, or flat copies of weights, which no backward pass reaches; or the ranks share the
    work on a model without the library's tensor parallelism.
    """
    if run.shares_work and not run.has(TENSOR_PARALLEL):
        return True
    first = next(run.steps(optimizer), ())
    names = [{*step.weights} for step in first]
    if not names or not all(names):
        return False
    are_copies = not any(one.local for step in first for one in step.gradients) and UNNAMED in min(names[0])
    return not set.intersection(*names) or (are_copies and bool(parted(run, first)))


def rejoins(run: Run, optimizer: int) -> bool:
    """Return whether ranks whose weights differ have the same again later, as with averages of weights (local SGD).

    No such averages are weights of a rank that keeps its own, such as those of a checkpoint that others load.
    """
    apart: list[str] = []
    last: dict[str, str] = {}
    for number in _rounds(run.ranks[0], optimizer):
        for steps in run.steps(number):
            weights, differ = steps[0].weights, parted(run, steps)
            if apart and weights and not differ and not any(last.get(one) == weights.get(one) for one in apart if last):
                return True
            apart, last = differ or apart, steps[0].after
    return False


def _rounds(rank: Rank, optimizer: int) -> list[int]:
    """Return the optimizer, and those that take its place in other rounds of federated averages, after reductions."""
    numbers: list[int] = []
    own, has_reduced = {(one.kind, one.line) for one in rank.steps(optimizer)}, False
    for record in rank.records:
        if isinstance(record, Collective):
            has_reduced = has_reduced or "reduce" in record.kind or "gather" in record.kind
        elif isinstance(record, Step) and (record.kind, record.line) in own:
            if record.optimizer not in numbers[-1:]:
                if record.wrapper or (numbers and not (record.number == 1 and has_reduced)):
                    return [optimizer]
                numbers.append(record.optimizer)
            has_reduced = False
    return numbers


def parted(run: Run, steps: Sequence[Step]) -> list[str] | None:
    """Return the weights that differ between ranks before a step.

    The result is None if they differ before Keras' first step, after which Horovod's callbacks and examples broadcast.
    """
    names = differing([step.weights for step in steps])
    return None if names and steps[0].number == 1 and run.library == "horovod.tensorflow" else names


def differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names for which ranks have different digests, or for which some ranks have none."""
    if not digests:
        return []
    names = dict.fromkeys(name for one in digests for name in one)
    return [name for name in names if len({one.get(name) for one in digests}) > 1]
