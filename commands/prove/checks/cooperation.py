"""Check that ranks are connected, call the same collectives and, on GPUs, have one device each."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from allstep.commands.prove.checks.gradients import unequal
from allstep.commands.prove.checks.samples import joining
from allstep.commands.prove.findings import Finding, listed, ranks
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import Forward, HostCopy, Restored, Step, World, Wrapped, Yielded
from allstep.commands.prove.runs import Run, Runs

_SEARCHED = "DistributedDataParallel looks for unused parameters in every step, and there are none"
_SAME_CALLS = (
    "have every rank come to each collective: no collective under `if rank == 0`, not even a call of "
    "DistributedDataParallel, equal numbers of batches"
)
_LOST = re.compile(r"[Cc]onnection (reset|closed)|preamble|SIGABRT")
"""Errors of a rank with which another one has broken off a collective."""
_MOST_STEPS = 0.8
"""Share of the steps that have the usual number of batches, if an accumulation does not decide on it."""


def check_world(runs: Runs) -> Iterator[Finding]:
    """Compare the number of ranks that were launched with the one that their library has."""
    run = runs.together
    sizes = {rank.all(World)[-1].size if rank.all(World) else 1 for rank in run.ranks}
    if run.num_ranks > 1 and sizes == {1}:
        yield Finding(
            "ranks-alone",
            "the ranks do not know of each other: each trains as if it were alone",
            f"the launcher has started {run.num_ranks} ranks, of which each sees a world of 1",
            "dist.init_process_group() under torchrun, hvd.init() under horovodrun, before anything else",
            run.ranks[0].steps()[0].line,
        )
    elif run.library == "tf.distribute" and (idle := [rank.number for rank in run.ranks if not rank.steps()]):
        yield Finding(
            "replicas-idle",
            "the strategy has replicas that do not train: the model is not in its scope, or not run by it",
            f"{len(run.ranks[0].steps())} steps of an optimizer on rank 0, none on {ranks(idle)}",
            "under strategy.scope(): make the model and compile it, and the optimizer; in a custom loop, "
            "strategy.run(step, args)",
            run.ranks[0].steps()[0].line,
        )


def check_steps(runs: Runs) -> Iterator[Finding]:
    """Find what makes ranks take different steps: skipped ones, or line searches that each rank does for itself."""
    yield from _line_searches(runs.together)
    yield from _skipped(runs)


def _line_searches(run: Run) -> Iterator[Finding]:
    """Compare the losses by which line searches decide, if gradients are averaged."""
    for steps in run.steps():
        losses = [step.closure_loss for step in steps if step.closure_loss is not None]
        if not losses or not steps[0].wrapper or all(math.isclose(losses[0], one, rel_tol=1e-5) for one in losses):
            continue
        yield Finding(
            "line-search-alone",
            "each rank searches along the line by the loss of its own samples, and so goes another way than others",
            f"in step {steps[0].number}, closures returned {listed([f'{one:.6g}' for one in losses])}",
            "return the mean loss of all ranks from the closure: all-reduce it after backward",
            steps[0].line,
        )
        return


def _skipped(runs: Runs) -> Iterator[Finding]:
    """Find a rank that reads batches without a step where others step, after which averages mix different batches.

    Other numbers of batches in most steps are an accumulation that the rank decides on.
    """
    numbers = [_batches_of_steps(rank) for rank in runs.together.ranks]
    counts = Counter(count for own in numbers for count in own)
    usual = max(counts, key=counts.__getitem__, default=0)
    if not usual or (counts[usual] < _MOST_STEPS * counts.total() and not _mixes_averages(runs.together)):
        return
    for index, together in enumerate(zip(*numbers, strict=False)):
        more = [rank for rank, count in enumerate(together) if count > usual and count % usual == 0]
        if more and usual in together:
            step = runs.together.ranks[more[0]].steps()[index]
            yield Finding(
                "steps-skipped",
                "a rank skips steps that other ranks take: from then on, averages mix different batches",
                f"for step {step.number}, {ranks(more)} read {together[more[0]]} batches, as against {usual} on others",
                "let all ranks skip a step if one does: all-reduce the condition, such as that the loss is not finite",
                step.line,
            )
            return


def _mixes_averages(run: Run) -> bool:
    """Return whether ranks apply different gradients, although they are averaged, since their steps do not fit.

    Nothing keeps a wrapper from averaging, or the gradients of equally many batches are the same on all ranks.
    """
    if (apart := unequal(run.steps())) is None:
        return False
    step = apart[0][0]
    by_batch = [
        dict(zip(itertools.accumulate(_batches_of_steps(rank)), rank.steps(), strict=False)) for rank in run.ranks
    ]
    common = sorted(set(by_batch[0]).intersection(*by_batch[1:]))
    fits = bool(common) and unequal(tuple(own[number] for own in by_batch) for number in common) is None
    return fits or bool(step.wrapper and not step.num_unwrapped and not step.bypass)


def _batches_of_steps(rank: Rank) -> list[int]:
    """Return how many batches the rank has read for each step of its first training loop."""
    first = next((loop.number for loop in rank.training_loops), None)
    numbers, count = [], 0
    for record in rank.records:
        if isinstance(record, Yielded) and record.loop == first:
            count += 1
        elif isinstance(record, Step) and record.loop == first and record.optimizer == 1:
            numbers.append(count)
            count = 0
    return numbers


def may_be_uneven(run: Run) -> Iterator[str]:
    """Yield a training loop that ranks leave after different numbers of batches, if nothing shows a fault."""
    for together in zip(*(rank.training_loops for rank in run.ranks), strict=False):
        ends = [_batches_until_next_loop(rank, loop.number) for rank, loop in zip(run.ranks, together, strict=True)]
        numbers = [number for number, _ in ends]
        if any(has_left and number < max(numbers) for number, has_left in ends) and not run.joins:
            yield (
                f"ranks begin another epoch after {listed(sorted({n for n, has_left in ends if has_left}))} batches "
                f"({together[0].line}), while others have had {max(numbers)}; right where loaders start over for ever, "
                "else: give all ranks the same number of batches"
            )
            return


def may_restore_less(run: Run) -> Iterator[str]:
    """Yield what an elastic state of Horovod does not hold, and a training loop needs after ranks have changed."""
    for state in run.ranks[0].all(Restored)[:1]:
        samplers = [loop.sampler.kind for loop in run.ranks[0].training_loops if loop.sampler]
        held = {one.removesuffix("StateHandler").lower() for one in state.kinds}
        needed = ["model", "optimizer"] + ["sampler"] * ("ElasticSampler" in samplers)
        if missing := [one for one in needed if one not in held]:
            yield (
                f"the elastic state is without the {' and the '.join(missing)} ({state.line}), which then stay as they "
                "are when ranks are lost or added; right where callbacks of a reset do more, else: "
                f"TorchState({', '.join(f'{one}={one}' for one in missing)}, ...)"
            )


def _batches_until_next_loop(rank: Rank, loop: int) -> tuple[int, bool]:
    """Return how many batches a loop has had, and whether the rank has begun another training loop since."""
    later = any(one.number > loop for one in rank.training_loops)
    return sum(one.loop == loop for one in rank.all(Yielded)), later


def check_collectives(runs: Runs) -> Iterator[Finding]:
    """Report where ranks are that are in a deadlock, or that still called collectives after others had left."""
    run = runs.together
    errors = {rank.number: rank.error for rank in run.ranks if rank.error}
    if run.stacks:
        waits = [f"rank {rank.number} {_place(rank)}" for rank in run.ranks]
        mend = _SAME_CALLS
        if all(len(rank.waits) > 1 for rank in run.ranks):
            mend = (
                "give collectives of another thread a process group of their own, as "
                'async_save(..., process_group=dist.new_group(backend="gloo"))'
            )
        yield Finding(
            "collective-left-out",
            "ranks wait for each other for ever: they do not call the same collectives in the same order",
            f"{'; '.join(waits)}{_stacks(run)}",
            mend,
            next((wait.line for rank in run.ranks for wait in rank.waits if wait.line), ""),
        )
    elif run.is_deserted:
        left = [rank.number for rank in run.ranks if rank.ended and not rank.error]
        yield Finding(
            "collective-left-out",
            f"{ranks(left)} left while others still called collectives",
            "; ".join(f"rank {number} ended with {error}" for number, error in errors.items()),
            f"have every rank take the same steps: equal numbers of batches, or {joining(run)}",
            next((rank.ended.line for rank in run.ranks if rank.error and rank.ended), ""),
        )
    elif run.failure and all(map(_LOST.search, errors.values() or [run.failure])):
        yield from _ended_by_each_other(run, errors)


def _ended_by_each_other(run: Run, errors: Mapping[int, str]) -> Iterator[Finding]:
    """Find calls of the model, or places of ranks, that differ between ranks whose connections have ended."""
    calls = [{one.line for one in rank.all(Forward) if not one.bypasses} for rank in run.ranks]
    alone = sorted(set.union(*calls) - set.intersection(*calls))
    waits = [one for one in run.ranks if one.wait and not (one.wait.computes or one.ended)]
    failed = next((one for one in run.ranks if one.number in errors), run.ranks[0])
    line = failed.ended.line if failed.ended else ""
    if not alone and (not errors or not waits or line in [one.wait.line for one in waits if one.wait]):
        return
    places = [f"rank {failed.number} failed at {line} with {errors[failed.number][:80]}"] if errors else [run.failure]
    places += [f"rank {one.number} {_place(one)}" for one in waits]
    places += [f"only some ranks call the model in {listed(alone)}"] * bool(alone)
    yield Finding(
        "collective-left-out",
        "ranks call other collectives, which fit neither in size nor in kind, and so end each other",
        "; ".join(places),
        _SAME_CALLS,
        (alone or [line])[0],
    )


def check_devices(runs: Runs) -> Iterator[Finding]:
    """Find ranks that share a GPU, copies to the host in every step, and needless searches for unused parameters."""
    run = runs.together
    first = next(run.steps(), None)
    if first is None:
        return
    shared = [device for device, count in Counter(step.device for step in first).items() if count > 1]
    if gpus := [device for device in shared if device != "cpu"]:
        yield Finding(
            "gpu-shared",
            "several ranks compute on one GPU",
            f"{ranks([i for i, step in enumerate(first) if step.device == gpus[0]])} have their weights on {gpus[0]}",
            "torch.cuda.set_device(local_rank) before anything is made on a GPU",
            first[0].line,
        )
    rank = run.ranks[0]
    yield from _copies(rank)
    if (ddp := _searching(run)) and not ddp.by_library:
        yield Finding(
            "unused-parameters-searched",
            _SEARCHED,
            f"all {len(first[0].weights)} weights had a gradient in {len(rank.steps())} steps",
            "leave find_unused_parameters=True out",
            ddp.line,
        )


def may_search(run: Run) -> Iterator[str]:
    """Yield that a library has DDP look for unused parameters, as transformers' Trainer does unless told otherwise."""
    if (ddp := _searching(run)) and ddp.by_library:
        yield (
            f"{_SEARCHED} ({ddp.line}); right where a library knows of some, else: "
            "TrainingArguments(ddp_find_unused_parameters=False), or what the library has for it"
        )


def _searching(run: Run) -> Wrapped | None:
    """Return a DDP that looks for unused parameters where all are used."""
    rank = run.ranks[0]
    if run.num_optimizers != 1 or not all(map(_uses_all, rank.steps())):
        return None
    return next((one for one in rank.all(Wrapped) if one.finds_unused), None)


def _uses_all(step: Step) -> bool:
    """Return whether all weights of a step have gradients from backward."""
    return {one.name for one in step.gradients if one.local} >= {*step.weights}


def _copies(rank: Rank) -> Iterator[Finding]:
    num_steps = len(rank.steps())
    for line, count in Counter(copy.line for copy in rank.all(HostCopy)).items():
        if num_steps and count >= num_steps:
            yield Finding(
                "host-copy-each-step",
                "the host waits for the GPU in every step, to copy a value from it",
                f"{count} copies in {num_steps} steps of rank {rank.number}",
                "keep sums on the GPU, and copy them once an epoch",
                line,
            )


def _place(rank: Rank) -> str:
    if rank.ended or not rank.waits:
        return "has ended"
    places = [f"{wait.what} {f'at {wait.line}' if wait.line else 'in another thread'}" for wait in rank.waits]
    return f"waits in {' and '.join(places)} after {len(rank.all(Step))} steps"


def _stacks(run: Run) -> str:
    """Return the frames of each rank's main thread, which is the last one that faulthandler writes."""
    texts = []
    for number, text in run.stacks.items():
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', text.rpartition("most recent call first")[2])
        texts += [f"\n    rank {number}: {name} {file}:{line}" for file, line, name in frames[:12]]
    return "".join(texts)
