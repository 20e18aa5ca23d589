"""Standard output and error that a process can lose: a reader that is gone, a full device, a closed descriptor.

A command whose output is lost ends: quietly with the status of a closed pipe, or with one line for a full device.
Training goes on without its output, and says so on standard error. Lost standard error is never a reason to end.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from allstep.common.base.errors import UserError

EXIT_CLOSED_PIPE = 141
"""Exit status that shells report for a process that SIGPIPE (13) has ended."""


class _Guarded:
    """Wrapper of a text stream that writes nothing more after its first error, and forwards everything but `close`."""

    def __init__(self, stream: TextIO, lost: Callable[[OSError], None]) -> None:
        self.stream, self._lost = stream, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._errors():
            self.stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._errors():
            self.stream.flush()

    close = flush  # for a user's code alone

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            silence(self.stream)
            self._lost(error)


def silence(stream: TextIO) -> None:
    """Send what a stream still holds, and what follows, to /dev/null."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def write_to_terminal(line: str) -> None:
    """Write a line to the terminal where the job was started, if there is one: mpirun's ranks share it.

    At a second Ctrl-C mpirun exits at once, and with it goes the reader of standard error.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])  # `stty tostop` stops writers in the background
    with contextlib.suppress(OSError), open(os.open("/dev/tty", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "w") as tty:
        tty.write(f"{line}\n")


@contextmanager
def ending_output() -> Iterator[None]:
    """End the process when nothing more can be written to standard output while the block runs.

    Raises SystemExit if the reader is gone, UserError if the device is full, or cannot be written.
    """
    with _guarding(_end):
        yield


@contextmanager
def lasting_output() -> Iterator[None]:
    """Go on in silence when nothing more can be written to standard output while the block runs."""
    with _guarding(_tell):
        yield


def _end(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise SystemExit(EXIT_CLOSED_PIPE) from None
    raise UserError(f"standard output cannot be written: {error.strerror}; make room, or send it elsewhere") from None


def _tell(error: OSError) -> None:
    reason = "nobody reads it any more" if error.errno == errno.EPIPE else error.strerror
    print(f"allstep: warning: standard output is lost ({reason}); training goes on", file=sys.stderr, flush=True)


@contextmanager
def _guarding(lost: Callable[[OSError], None]) -> Iterator[None]:
    _open_closed_descriptors()
    output, errors = _Guarded(_stream(1), lost), _Guarded(_stream(2), lambda _: None)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):  # pyright: ignore[reportArgumentType]
        try:
            yield
        except SystemExit:
            output.flush()
            raise
        output.flush()


def _open_closed_descriptors() -> None:
    """Open /dev/null where a standard descriptor is closed, as by `>&-`; the next file opened would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, descriptor)  # also makes it inheritable
            if nothing != descriptor:
                os.close(nothing)


def _stream(descriptor: int) -> TextIO:
    stream = sys.stdout if descriptor == 1 else sys.stderr
    if isinstance(stream, _Guarded):
        return stream.stream
    return stream or open(descriptor, "w", closefd=False)  # noqa: SIM115
