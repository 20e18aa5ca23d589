"""Tell validation from training in the records of a rank.

Validation is a loop without steps over a loader of its own. Passes of a teacher, of pseudo-labels, or over training
samples are not. Without loaders it is a few calls between some of the steps, on samples that are not trained on.
"""

from collections.abc import Sequence

from allstep.commands.prove.records import BACKWARD, Forward, Loop, Record, Step, Waiting

MOST = 0.5
"""Share of samples in common above which batches count as the same."""


def validations(records: Sequence[Record]) -> set[int]:
    """Return the positions of the records of calls that validate a model."""
    calls = {index: record for index, record in enumerate(records) if isinstance(record, Forward)}
    found = {index for index, call in calls.items() if call.evaluates}
    candidates = {index: call for index, call in calls.items() if call.evaluates is None and call.in_eval}
    foreign = _loops_of_other_data(records)
    in_loops = {index for index, call in candidates.items() if call.loop in foreign}
    steps = [record for record in records if isinstance(record, Step)]
    gaps = {index: call.step for index, call in candidates.items() if not call.loop and not call.is_training}
    outside = {index for index, step in gaps.items() if step > 1 and 2 * len({*gaps.values()}) <= len(steps)}
    found |= in_loops | outside
    trained = {row for index, call in calls.items() if call.is_training and index not in found for row in call.rows}
    return {index for index in found if calls[index].evaluates or not _is_among(calls[index].rows, trained)}


def _is_among(rows: Sequence[str], trained: set[str]) -> bool:
    return bool(rows) and len({*rows} & trained) > MOST * len({*rows})


def _loops_of_other_data(records: Sequence[Record]) -> set[int]:
    """Return the numbers of the loops in which models are called but not trained, over data that are not trained on."""
    spans: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        if isinstance(record, Forward) and record.loop:
            spans.setdefault(record.loop, []).append(index)
    trains = {loop for loop, span in spans.items() if _has_training(records, loop, span)}
    trains |= {record.loop for record in records if isinstance(record, Step)}
    data = {record.number: record.data for record in records if isinstance(record, Loop)}
    trained_data = {data.get(loop) for loop in trains} - {0, None}
    return {loop for loop in spans if loop not in trains and data.get(loop) not in trained_data}


def _has_training(records: Sequence[Record], loop: int, span: Sequence[int]) -> bool:
    """Return whether a backward pass or a step happens between the calls of a loop, or right after them."""
    for index in range(span[0], len(records)):
        record = records[index]
        is_after = index > span[-1]
        if is_after and (isinstance(record, Loop) or (isinstance(record, Forward) and record.loop != loop)):
            return False
        if isinstance(record, Step) or (isinstance(record, Waiting) and record.what == BACKWARD):
            return True
    return False
