"""What we use of the insides of Python, of launchers and of both frameworks; `tests/common/test_compat.py` tries each.

Nothing here is promised by whom it belongs to. Nothing is imported either: `--help` reads this file as well.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

# Keras 3.15 imports them for wrappers and pictures that the trainer does not use: a fifth of its start-up.
_UNUSED = ("sklearn", "scipy", "matplotlib")

# Modules in whose code a rank may wait for others: PyTorch 2.14, TensorFlow 2.21, Keras 3.15, Horovod 0.28.1, and ours
# that calls them, since who waits for a GPU does so in no Python code of PyTorch.
_WAITING = (
    *("torch.", "tensorflow.", "keras.", "horovod."),
    *("allstep.pytorch.", "allstep.tensorflow.", "allstep.common.steps_in_flight"),
)
# Through whose code one thread waits for another: it waits for what its caller waits for.
_PASSED_THROUGH = ("threading", "concurrent.futures.")


@contextmanager
def without_unused_libraries() -> Iterator[None]:
    """Make the import of what Keras does not need fail as if it were not installed; Keras looks whether it is.

    None in `sys.modules` is what Python's importlib takes for "not to be had".
    """
    absent = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def is_in_framework() -> bool:
    """Whether the main thread is where it may wait for others, and not in anybody else's code.

    CPython tells where another thread is by `sys._current_frames`, and a frame's module by its globals.
    """
    main = threading.main_thread().ident
    assert main is not None  # only a thread that has not started has no number
    frame: FrameType | None = sys._current_frames()[main]
    while frame and (name := frame.f_globals.get("__name__", "")).startswith(_PASSED_THROUGH):
        frame = frame.f_back
    return frame is not None and name.startswith(_WAITING)


def is_open_mpi_daemon(process: int) -> bool:
    """Whether this is the daemon of Open MPI 4.1 that starts ranks on another host than mpirun's.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{process}/comm").read_text().strip() == "orted"


def take_for_values(parser: argparse.ArgumentParser, pattern: str) -> None:
    """Have the parser take words that begin with a hyphen and match for values of flags, not for flags.

    argparse of Python 3.10 to 3.13 asks `_negative_number_matcher`.
    """
    parser._negative_number_matcher = re.compile(pattern, re.IGNORECASE)


def flag_names(parser: argparse.ArgumentParser) -> Iterable[str]:
    """The names of the parser's flags, hyphens included; argparse keeps its actions by them."""
    return parser._option_string_actions


def wait_without_polling(service: Any) -> None:
    """Have a service of Horovod's sleep until there is a request, and run until the process ends.

    Those of horovodrun look fifty times a second whether they are to end (tools/horovod_patches/better/0043); in a rank
    that trains, each look takes the interpreter away from it.
    """
    service._server.shutdown()
    service._thread.join()
    service._thread = threading.Thread(target=service._server.serve_forever, args=(None,), daemon=True)
    service._thread.start()
