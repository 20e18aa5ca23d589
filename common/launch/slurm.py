"""Slurm's notations for a list of hosts, and for the number of tasks on each."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from string import digits

from allstep.common.base.errors import UserError, quoted

# More than any cluster has; a list of more hosts, or of longer names, is a mistake or an attempt to fill the memory.
_MAX_HOSTS = 2**16
_MAX_CHARACTERS = 253


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's tasks-per-node list: `4(x2),3` is [4, 4, 3]. Raises UserError if the text is not such a list."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part, re.ASCII)
        if not match or len(counts) > _MAX_HOSTS:
            raise UserError(
                f"expected Slurm's tasks per node as in 4(x2),3, received {quoted(text)}; check SLURM_TASKS_PER_NODE"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's compact host list: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login.

    Raises UserError if the text is not such a list, or has more hosts than any cluster.
    """

    def wrong(received: str) -> UserError:
        return UserError(
            f"expected a list of hosts as in gpu[01-03,7],login, received {received}; check the launcher's host list"
        )

    part = r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", text):
        raise wrong(quoted(text))
    hosts: list[str] = []
    for name in re.findall(part, text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", name):
            spans = map(_span, ranges.split(",")) if ranges else [[""]]
            numbers = list(islice(chain.from_iterable(spans), _MAX_HOSTS + 1))
            if len(hosts) + len(expanded) * len(numbers) > _MAX_HOSTS:
                raise wrong(f"more than {_MAX_HOSTS} of them")
            if len(expanded[0]) + len(literal) + len(numbers[0]) > _MAX_CHARACTERS:
                raise wrong(f"a name of more than {_MAX_CHARACTERS} characters")
            expanded = [head + literal + number for head in expanded for number in numbers]
        hosts += expanded
    return hosts


def _span(span: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d{1,250})(?:-(\d{1,250}))?", span, re.ASCII)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"expected a span of host numbers as in 01-03, received {quoted(span)}; check the launcher's host list"
        )
    return (str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2] or match[1]) + 1))


def compress(names: Sequence[str]) -> str:
    """Return Slurm's compact list of hosts, in their order: gpu01, gpu02, gpu7 is `gpu[01-02,7]`."""
    parts = []
    for (prefix, _), group in groupby(names, key=lambda name: (name.rstrip(digits), name[-1] in digits)):
        numbers = [name[len(prefix) :] for name in group]
        parts.append(f"{prefix}[{_spans(numbers)}]" if len(numbers) > 1 else prefix + numbers[0])
    return ",".join(parts)


def _spans(numbers: Sequence[str]) -> str:
    spans: list[list[str]] = []
    for number in numbers:
        # `expand_nodelist` makes all numbers of a span as wide as the first.
        if spans and number == str(int(spans[-1][-1]) + 1).zfill(len(spans[-1][0])):
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else span[0] for span in spans)
