"""Settings for every test process, made before anything else is imported."""

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator

import gpus

gpus.hide()

# Imported objects are never garbage: do not scan them while tests are collected or run.
gc.disable()

import launches  # noqa: E402
import pytest  # noqa: E402
import schedule  # noqa: E402
import warm_start  # noqa: E402
from hypothesis import settings  # noqa: E402

from allstep.common.process import exit  # noqa: E402
from allstep.common.process.environment import restored_environment  # noqa: E402

# A shell makes its background jobs ignore Ctrl-C, and the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` passes these to make; a make that a test starts must not take itself for its child.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)

# mpirun looks for ssh although it starts ranks of this host without.
if shutil.which("ssh") is None:
    os.environ["OMPI_MCA_plm_rsh_agent"] = "false"  # noqa: SIM112

# Use the same examples in every run, and assert no time: machines are noisy.
settings.register_profile("allstep", derandomize=True, deadline=None)
settings.load_profile("allstep")


launches.guard()


def tell_exits() -> None:
    """Write all stacks where code under test ends this process, whose standard error pytest keeps to itself."""
    end, error = exit._exit, os.dup(2)

    def tell(status: int) -> None:
        faulthandler.dump_traceback(error)
        end(status)

    exit._exit = tell


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help="write seconds.json: of files, and slow tests")
    parser.addoption("--warm", action="store_true", help="start programs as forks of a process with the framework")


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers of forks, tell exits, and import Triton before TensorFlow, since the other order crashes it."""
    tell_exits()
    is_worker, only_collects = hasattr(config, "workerinput"), config.option.collectonly
    if not is_worker and not only_collects:
        warm_start.start()
    if is_worker or only_collects or not config.getoption("numprocesses", None):
        import torch._dynamo  # noqa: F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> schedule.FileScheduler | None:
    return schedule.FileScheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    launches.mark(items)
    schedule.mark(items)
    schedule.sort(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """Handle signals as before when the block has ended: a run that was stopped ignores those that ask to stop."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    launches.watch(item)
    try:
        # What trains in this process chooses a controller and interfaces.
        with restored_handlers(), restored_environment():
            warm_start.choose(item)
            return (yield)
    finally:
        launches.watch(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Fail a test that leaves a watchdog behind, which may end this process in a later test."""
    yield
    assert not any(thread.name == exit.WATCH for thread in threading.enumerate()), "a watchdog is left"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    schedule.note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-seconds") and not hasattr(session.config, "workerinput"):
        schedule.write()
