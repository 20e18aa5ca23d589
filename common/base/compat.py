"""Uses of undocumented internals of Python, launchers and frameworks; `tests/common/base/test_compat.py` tests each.

This module imports no framework, because `--help` imports it.
"""

import argparse
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

# Keras 3.15 imports them for wrappers and plots that the trainer does not use, which takes a fifth of its start-up.
_UNUSED = ("sklearn", "scipy", "matplotlib")

# Modules in whose code a rank may wait for others: PyTorch 2.14, TensorFlow 2.21, Keras 3.15, Horovod 0.28.1, and ours
# that call them, because a thread that waits for a GPU is in no Python code of PyTorch.
_WAITING = (
    *("torch.", "tensorflow.", "keras.", "horovod."),
    *("allstep.pytorch.", "allstep.tensorflow.", "allstep.common.training.steps_in_flight"),
)
# Modules with collectives, or in which one is called: DistributedDataParallel reduces gradients in backward passes.
_OF_COLLECTIVES = ("horovod.", "torch.distributed.", "torch.autograd.")
# Modules in which a thread waits for another thread: the frame of their caller decides.
_PASSED_THROUGH = ("threading", "concurrent.futures.")


@contextmanager
def without_unused_libraries() -> Iterator[None]:
    """Make imports of libraries that Keras uses only if they are installed fail, as if they were not installed.

    Python's importlib treats None in `sys.modules` as "cannot be imported".
    """
    absent = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def is_in_framework() -> bool:
    """Return whether the main thread is in code that may wait for other ranks.

    CPython gives the frame of another thread by `sys._current_frames`, and a frame's globals name its module.
    """
    frame = _frame_of_main_thread()
    while frame and (name := frame.f_globals.get("__name__", "")).startswith(_PASSED_THROUGH):
        frame = frame.f_back
    return frame is not None and name.startswith(_WAITING)


def is_in_collective() -> bool:
    """Return whether the main thread is in a call that can only be over with other ranks.

    TensorFlow's functions do not show it: their collectives are in a graph.
    """
    frame = _frame_of_main_thread()
    while frame and not frame.f_globals.get("__name__", "").startswith(_OF_COLLECTIVES):
        frame = frame.f_back
    return frame is not None


def _frame_of_main_thread() -> FrameType | None:
    main = threading.main_thread().ident
    assert main is not None  # only a thread that has not started has no number
    return sys._current_frames()[main]


def is_open_mpi_daemon(process: int) -> bool:
    """Return whether a process is the daemon by which Open MPI 4.1 starts ranks on hosts other than mpirun's.

    Raises OSError if the process has ended.
    """
    return Path(f"/proc/{process}/comm").read_text().strip() == "orted"


def take_for_values(parser: argparse.ArgumentParser, pattern: str) -> None:
    """Make the parser accept words that begin with a hyphen and match `pattern` as values of flags.

    argparse of Python 3.10 to 3.13 uses `_negative_number_matcher` for that.
    """
    parser._negative_number_matcher = re.compile(pattern, re.IGNORECASE)


def flag_names(parser: argparse.ArgumentParser) -> Iterable[str]:
    """Return the names of the parser's flags, including hyphens; argparse keeps its actions by these names."""
    return parser._option_string_actions


def wait_without_polling(service: Any) -> None:
    """Make a Horovod service sleep until there is a request, and run until the process ends.

    Horovod's services check fifty times a second whether to end (commands/horovod/patches/better/0043), and each check
    takes Python's interpreter lock from the training thread.
    """
    service._server.shutdown()
    service._thread.join()
    service._thread = threading.Thread(target=service._server.serve_forever, args=(None,), daemon=True)
    service._thread.start()
