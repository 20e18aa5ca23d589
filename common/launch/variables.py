"""Strict parsing of environment variables that hold a number, a port, an address, an interface, or Slurm's hosts.

Python's `int` accepts digits of other scripts, and fails for 5,000 digits; C's `strtol`, which Horovod uses, returns 0
for anything that is not a number.
"""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from string import digits

from allstep.common.base.errors import UserError, quoted

# Limits of the ranks of a job, and of the hardware threads or GPUs of a host (Linux's NR_CPUS).
MAX_RANKS = 2**20
MAX_PER_HOST = 2**13

_DIGITS = re.compile(r"[0-9]{1,18}")
_FRACTION = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?(e-?[0-9]{1,2})?")
_ADDRESS = re.compile(r"(?=.{1,253}$)[!-\-/-~]{1,63}(\.[!-\-/-~]{1,63})*\.?")  # a name, or an address


def read_number(
    name: str, environ: Mapping[str, str], *, minimum: int = 0, maximum: int = MAX_RANKS, remedy: str
) -> int:
    """Read the whole number in the variable `name`.

    Raises UserError if it is missing, not a number, or not from `minimum` to `maximum`; `remedy` tells what to do.
    """
    text = environ.get(name)
    value = int(text) if text and _DIGITS.fullmatch(text) else None
    if value is None or not minimum <= value <= maximum:
        expected = f"a whole number from {minimum} to {maximum}" if minimum < maximum else str(minimum)
        raise UserError(f"expected {name} to be {expected}, received {quoted(text)}; {remedy}")
    return value


def read_address(name: str, port_name: str, environ: Mapping[str, str], *, remedy: str) -> tuple[str, int]:
    """Read the host and the port in two variables.

    Raises UserError if one of them is missing or wrong; `remedy` tells what to do.
    """
    host = environ.get(name)
    if not host or not _ADDRESS.fullmatch(host):
        raise UserError(f"expected {name} to be the name or address of a host, received {quoted(host)}; {remedy}")
    return host, read_number(port_name, environ, minimum=1, maximum=65535, remedy=remedy)


def read_num_threads(environ: Mapping[str, str]) -> int | None:
    """Read the number in OMP_NUM_THREADS, or the first of several for nested loops; None if it is not set.

    Raises UserError if the value is not a number.
    """
    text = environ.get("OMP_NUM_THREADS")
    if not text:
        return None
    remedy = "correct it, or unset it to have the cores divided by the ranks of the host"
    numbers = [
        read_number("OMP_NUM_THREADS", {"OMP_NUM_THREADS": part}, minimum=1, maximum=MAX_PER_HOST, remedy=remedy)
        for part in text.split(",")
    ]
    return numbers[0]


_SWITCH = (0, 1)
_SECONDS = (0, 10**6)
_HOROVOD_NUMBERS = {
    "HOROVOD_FUSION_THRESHOLD": (0, 2**34),  # bytes of a buffer, which it allocates on each GPU, too
    "HOROVOD_CACHE_CAPACITY": (0, 2**20),
    "HOROVOD_NUM_NCCL_STREAMS": (1, 64),
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": (1, 2**31 - 1),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": (1, 10**6),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": _SECONDS,
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _SECONDS,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": (0, 10**6),
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": (1, 10**6),
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": (1, 10**6),
    **dict.fromkeys(
        (
            "HOROVOD_AUTOTUNE",
            "HOROVOD_BATCH_D2D_MEMCOPIES",
            "HOROVOD_DISABLE_GROUP_FUSION",
            "HOROVOD_DYNAMIC_PROCESS_SETS",
            "HOROVOD_ELASTIC",
            "HOROVOD_ENABLE_ASYNC_COMPLETION",
            "HOROVOD_ENABLE_XLA_OPS",
            "HOROVOD_HIERARCHICAL_ALLGATHER",
            "HOROVOD_HIERARCHICAL_ALLREDUCE",
            "HOROVOD_MPI_THREADS_DISABLE",
            "HOROVOD_STALL_CHECK_DISABLE",
            "HOROVOD_TIMELINE_MARK_CYCLES",
            "HOROVOD_TORUS_ALLREDUCE",
        ),
        _SWITCH,
    ),
}
_HOROVOD_FRACTIONS = {"HOROVOD_CYCLE_TIME": 60_000, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": 1}  # at most
_HOROVOD_WORDS = {
    "HOROVOD_CONTROLLER": ("mpi", "gloo"),
    "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl"),
    "HOROVOD_LOG_LEVEL": ("trace", "debug", "info", "warning", "error", "fatal"),
}
# NCCL_SOCKET_IFNAME is left out, because it may be a pattern.
_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse values that Horovod, Gloo or OpenMP would misread, or abort on."""
    remedy = "correct it, or unset it"
    read_num_threads(environ)
    for name, (minimum, maximum) in _HOROVOD_NUMBERS.items():
        if name in environ:
            read_number(name, environ, minimum=minimum, maximum=maximum, remedy=remedy)
    for name, maximum in _HOROVOD_FRACTIONS.items():
        text = environ.get(name, "0")
        if not _FRACTION.fullmatch(text) or float(text) > maximum:
            raise UserError(f"expected {name} to be a number from 0 to {maximum}, received {quoted(text)}; {remedy}")
    for name, words in _HOROVOD_WORDS.items():
        if name in environ and environ[name].lower() not in words:
            received = quoted(environ[name])
            raise UserError(f"expected {name} to be one of {', '.join(words)}, received {received}; {remedy}")
    for name in _INTERFACES:
        known = [interface for _, interface in socket.if_nameindex()]
        if any(part not in known for part in environ.get(name, "").split(",") if part):
            raise UserError(
                f"expected {name} to be a network interface of this host, one of {', '.join(known)}, received "
                f"{quoted(environ[name])}; {remedy}"
            )


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
