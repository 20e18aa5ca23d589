"""TCP rendezvous: all ranks connect to a known port of rank 0, and exchange a line of text.

Any process may connect to that port; connections that do not identify as a rank, or send too much, are ignored.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import TextIO

from allstep.common.base.errors import Fault, UserError, quoted
from allstep.common.launch.placement import Placement

_POLL_SECONDS = 0.05
# A rank sends a short line at once. These limits stop other processes, which may send nothing or too much.
_LINE_SECONDS = 2.0
_MAX_CHARACTERS = 2**16


def meet(text: str, placement: Placement, address: tuple[str, int], *, topic: str, seconds: float) -> list[str]:
    """Return the texts of all ranks, in the order of ranks. The address may be reused for another topic.

    Raises UserError if rank 0 cannot listen there, or another process claims this rank, or another number of ranks;
    Fault if a rank did not come in time.

    Args:
        address: address of rank 0, as seen from this rank; on rank 0, an empty host means all its addresses.
        seconds: maximum time between the arrival of the first and of the last rank.
    """
    deadline = time.monotonic() + seconds
    if placement.rank == 0:
        return _collect(text, placement, address, topic, deadline)
    introduction = json.dumps([topic, placement.world_size, placement.rank, text])
    while True:
        # Rank 0 may not listen yet, or another process may listen there.
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            answer = json.loads(_ask(introduction, address, deadline, placement.world_size * _MAX_CHARACTERS))
            if isinstance(answer, str):
                raise UserError(answer if answer.isprintable() else quoted(answer))
            if len(answer) == placement.world_size and all(isinstance(said, str) for said in answer):
                return answer
        wait(deadline, f"rank 0 at {address[0]}:{address[1]}")


def wait(deadline: float, whom: str) -> None:
    """Sleep for a polling interval.

    Raises Fault, in which `whom` names what was waited for, if the deadline, in seconds of `time.monotonic`, has
    passed.
    """
    if time.monotonic() > deadline:
        raise Fault(f"{whom} did not come in time")
    time.sleep(_POLL_SECONDS)


def _ask(introduction: str, address: tuple[str, int], deadline: float, max_characters: int) -> str:
    left = max(_POLL_SECONDS, deadline - time.monotonic())
    with socket.create_connection(address, timeout=left) as connection, connection.makefile("rw") as stream:
        _say(introduction, stream)
        return stream.readline(max_characters)


def _collect(text: str, placement: Placement, address: tuple[str, int], topic: str, deadline: float) -> list[str]:
    texts = {0: text}
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(socket.create_server(address, backlog=placement.world_size))
        except OSError as error:
            assert error.errno is not None  # an error of the operating system
            reason = os.strerror(error.errno)  # without the address, which Python adds
            raise UserError(
                f"expected a port at which rank 0 can listen, received {address[1]} ({reason}); give another, or end "
                "what has it"
            ) from None
        streams = []
        while len(texts) < placement.world_size:
            server.settimeout(max(_POLL_SECONDS, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(placement.world_size) if rank not in texts)
                raise Fault(f"rank {missing} did not come in time") from None
            connection.settimeout(_LINE_SECONDS)
            stream = opened.enter_context(opened.enter_context(connection).makefile("rw"))
            rank, said = _introduced(stream, topic, placement.world_size, texts)
            if said is not None:
                texts[rank] = said
                streams.append(stream)
        answer = json.dumps([texts[rank] for rank in range(placement.world_size)])
        for stream in streams:
            with contextlib.suppress(OSError):  # the others will soon notice a rank that is gone
                _say(answer, stream)
    return json.loads(answer)


def _introduced(stream: TextIO, topic: str, world_size: int, texts: Mapping[int, str]) -> tuple[int, str | None]:
    """Read a rank and its text; the text is None if the sender is not a rank, or is refused."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        about, claimed_size, rank, text = json.loads(stream.readline(_MAX_CHARACTERS))
        if about != topic or type(rank) is not int or type(claimed_size) is not int or not isinstance(text, str):
            return 0, None
        if claimed_size != world_size:
            expected, received = f"{world_size} ranks, as rank 0 does", f"{claimed_size} from rank {rank}"
        elif rank in texts:
            expected, received = "every rank once", f"rank {rank} of {world_size} twice"
        else:
            return (rank, text) if 0 < rank < world_size else (0, None)
        _say(
            json.dumps(f"expected {expected}, received {received}; correct RANK and WORLD_SIZE, and start it again"),
            stream,
        )
    return 0, None


def _say(line: str, stream: TextIO) -> None:
    print(line, file=stream, flush=True)
