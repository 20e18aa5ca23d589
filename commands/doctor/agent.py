"""Doctor agent on one host: answers each question on standard input by a line of JSON, until the input ends.

    echo '{"question": "hello"}' | python -m allstep.commands.doctor.agent

Meanwhile it listens on a port of all addresses, so that other hosts can try to connect; it reads nothing from there.
"""

import json
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from allstep.common.base.flag_types import Parser
from allstep.common.files import strict_json
from allstep.common.files.strict_json import from_json, to_json

# Prefix of each answer, since login shells may print other lines.
MARK = "allstep-doctor "
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """Address on which a host listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Question:
    """Question to an agent."""

    question: Literal["hello", "facts", "connect"]
    to: tuple[Address, ...] = ()
    """Hosts to reach, if the question is connect."""


@dataclass(frozen=True)
class Hello:
    """Answer to hello."""

    unix_time: float
    port: int
    """Port on which this host listens."""


@dataclass(frozen=True)
class Connected:
    """Answer to connect."""

    unreached: dict[str, str]
    """Reason for each host that cannot be reached from this one, by the host's name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Answer the questions on standard input."""
    parser = Parser("allstep.commands.doctor.agent", __doc__)
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    parser.add_argument("--frameworks", action="store_true", help="check PyTorch and TensorFlow, too")
    parser.add_argument("--data", action="store_true", help="compute checksums of data sets")
    flags = parser.parse_args(argv)
    with socket.create_server(("", 0)) as listener:
        for line in sys.stdin.buffer:
            question = from_json(Question, strict_json.loads(line), "question")
            answer = to_json(_answer(question, flags, listener))
            print(f"{MARK}{json.dumps(answer)}", flush=True)


def _answer(question: Question, flags: Namespace, listener: socket.socket) -> object:
    if question.question == "hello":
        return Hello(time.time(), listener.getsockname()[1])
    if question.question == "connect":
        with ThreadPoolExecutor(max(1, len(question.to))) as pool:
            reasons = zip(question.to, pool.map(_why_unreached, question.to), strict=True)
            return Connected({address.host: reason for address, reason in reasons if reason})
    from allstep.commands.doctor.facts import gather  # slow to import, while hello must be fast for comparing clocks

    return gather(flags.data_dir, with_frameworks=flags.frameworks, with_data=flags.data)


def _why_unreached(address: Address) -> str | None:
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)


if __name__ == "__main__":
    main()
