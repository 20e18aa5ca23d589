"""Launches: commands by strategy, an environment, a log and temporary folders, and the end of all their processes."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from allstep.commands.shared import process_tree
from allstep.common.catalog.strategies import STRATEGIES

_NUM_LOG_LINES = 30
_GRACE_SECONDS = 5.0
"""Time for a launcher to end its ranks on other hosts, which only the launcher can do."""

Status = Literal["ok", "failed", "timeout"]


@dataclass(frozen=True)
class Outcome:
    """Result of a launch."""

    status: Status
    reason: str | None
    """One line if the status is not ok."""
    launched_at: float
    """Unix time of the start."""
    seconds: float
    """Running time, without the time spent waiting for a turn."""
    log: str | None
    """Last lines of output if the status is not ok."""


def environment() -> dict[str, str]:
    """Return the variables of an activated virtual environment, with one thread per rank."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


class Job:
    """Commands that were started at the same time; none outlives this process, even if it is killed."""

    def __init__(
        self, commands: Sequence[Sequence[object]], output: IO[bytes], environ: Mapping[str, str | None] | None = None
    ) -> None:
        """Start the commands.

        Args:
            output: readable file to which the commands print.
            environ: variables in addition to those of `environment`; None removes a variable.
        """
        self._given = {name: value for name, value in {**environment(), **(environ or {})}.items() if value is not None}
        self.mark = process_tree.new_mark()
        process_tree.guard(self.mark)
        self.launched_at = time.time()
        self.processes: list[subprocess.Popen] = []
        self._output = output
        self._deadline: float | None = None  # not asked to end yet
        try:
            for command in commands:
                self.start(command)
        except BaseException:
            self.end()
            raise

    def start(self, command: Sequence[object]) -> subprocess.Popen:
        """Start one more command of the job and return its process."""
        process = subprocess.Popen(
            list(map(str, command)),
            env={**self._given, process_tree.VARIABLE: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    @property
    def status(self) -> int | None:
        """Exit status of the first command that failed; 0 if all have succeeded, None while they run."""
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def wait(self, seconds: float) -> int:
        """Wait for the job to end and return its status. Raises TimeoutError if it did not end within `seconds`."""
        deadline = time.monotonic() + seconds
        while (status := self.status) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"took over {seconds:g} s")
            time.sleep(process_tree.POLL_SECONDS)
        return status

    def printed(self) -> str:
        """Return what the job has printed so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def left(self) -> list[int]:
        """Return the ids of the job's processes that still run, including the commands."""
        return process_tree.marked(self.mark)

    def ask_to_end(self) -> float:
        """Ask running commands to end, only once: a launcher that is asked twice does not end its ranks in order.

        Returns: the deadline, on the clock of `time.monotonic`.
        """
        if self._deadline is None:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            self._deadline = time.monotonic() + _GRACE_SECONDS
        return self._deadline

    def end(self) -> None:
        """End the job with every process that it has started."""
        deadline = self.ask_to_end()
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(process_tree.POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the job with every process that it has started, without asking first."""
        process_tree.kill(self.mark)
        for process in self.processes:
            process.wait()

    def result(self, seconds: float, time_limit: float) -> tuple[Status, str | None] | None:
        """Return status and reason if all commands have ended, one has failed, or `time_limit` is over; else None.

        `seconds` is how long the job has run.
        """
        if self.status is None:
            return ("timeout", f"took longer than {time_limit:g} s and was ended") if seconds > time_limit else None
        return ("failed", f"ended with status {self.status}") if self.status else ("ok", None)

    def outcome(self, status: Status, reason: str | None, seconds: float) -> Outcome:
        """Return the outcome of a job that has ended."""
        lines = self.printed().splitlines()
        if status == "failed":
            reason = _cause(lines) or reason
        log = None if status == "ok" else "\n".join(lines[-_NUM_LOG_LINES:])
        return Outcome(status, reason, self.launched_at, seconds, log)


@contextmanager
def running(*commands: Sequence[object], environ: Mapping[str, str | None] | None = None) -> Iterator[Job]:
    """Run a job during the block; none of its processes is left when the block ends."""
    with tempfile.TemporaryFile() as output:
        job = Job(commands, output, environ)
        try:
            yield job
        finally:
            job.end()


def run_job(commands: Sequence[Sequence[object]], *, time_limit: float, num_threads: int | None) -> Outcome:
    """Run commands at the same time to their ends; the first that fails ends the others.

    Args:
        time_limit: seconds after which all are ended, with every process that they started.
        num_threads: compute threads of each rank; None leaves the number to OMP_NUM_THREADS or, without it, to the
            ranks, which divide the cores of their host.
    """
    [(_, outcome)] = run_jobs([commands], at_once=1, time_limit=time_limit, num_threads=num_threads)
    return outcome


def run_jobs(
    jobs: Iterable[Sequence[Sequence[object]]], *, at_once: int, time_limit: float, num_threads: int | None
) -> Iterator[tuple[int, Outcome]]:
    """Run jobs as `run_job` does, `at_once` at a time; yield the number (from 0) and outcome of each as it ends."""
    threads = os.environ.get("OMP_NUM_THREADS") if num_threads is None else str(num_threads)
    waiting, under_way = deque(enumerate(jobs)), {}
    with ExitStack() as stack:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                number, commands = waiting.popleft()
                job = stack.enter_context(running(*commands, environ={"OMP_NUM_THREADS": threads}))
                under_way[number] = job, time.perf_counter()
            for number, (job, started) in list(under_way.items()):
                seconds = time.perf_counter() - started
                if result := job.result(seconds, time_limit):
                    del under_way[number]
                    job.end()
                    yield number, job.outcome(*result, seconds)
            time.sleep(process_tree.POLL_SECONDS)


def _cause(lines: Sequence[str]) -> str | None:
    """Return the cause that a trainer reported, without the launcher's prefix, else the last error named."""
    causes = [line[line.index("allstep: ") :] for line in lines if "allstep: " in line and "warning" not in line]
    bare = [_PREFIX.sub("", line).strip() for line in lines]
    errors = [line for line in bare if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return causes[0] if causes else errors[-1] if errors else None


# Prefix that mpirun and horovodrun put in front of a rank's line.
_PREFIX = re.compile(r"^\[\d+(,\d+)?\]<std(out|err)>:")


LAUNCHERS = {
    "horovodrun": ("horovodrun", "-np", "{ranks}", "python"),
    # Without --disable-cache, horovodrun reuses checks of hosts from the last hour.
    "horovodrun-mpi": ("horovodrun", "--mpi", "--disable-cache", "-np", "{ranks}", "python"),
    "horovodrun-gloo": ("horovodrun", "--gloo", "--disable-cache", "-np", "{ranks}", "python"),
    # Without --oversubscribe, mpirun refuses more ranks than it counts cores.
    "mpirun": ("mpirun", "--bind-to", "none", "--oversubscribe", "-np", "{ranks}", "python"),
    "mpiexec": ("mpiexec", "-n", "{ranks}", "python"),
    # --standalone picks a free port.
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "{ranks}"),
    "srun": ("srun", "-n", "{ranks}", "python"),
}
"""Words in front of a Python program's arguments that start it on ranks of this host."""


def start(launcher: str | None, num_ranks: int | None = 1) -> list[str]:
    """Return the words of a launcher for `num_ranks` ranks; `python` without a launcher."""
    return [word.format(ranks=num_ranks) for word in LAUNCHERS[launcher]] if launcher else ["python"]


def train_command(
    framework: str, strategy: str, num_ranks: int, flags: Sequence[object], *, module: str | None = None
) -> list[str]:
    """Return the command that trains with a strategy on `num_ranks` ranks, or on as many devices of one rank.

    `module` runs instead of the framework's trainer, with the trainer's flags.
    """
    entry = STRATEGIES[framework][strategy]
    # A launcher already gets the number of ranks.
    given_flags = () if entry.launcher or not entry.num_ranks_flag else (entry.num_ranks_flag, num_ranks)
    module = module or f"allstep.{framework}.train"
    words = (*start(entry.launcher, num_ranks), "-m", module, "--strategy", strategy, *given_flags, *flags)
    return list(map(str, words))


_HOLDER = ".process"


@contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Yield a new folder for temporary files of a command, and remove it when the block ends.

    The process holds a lock on a file in it, which the kernel releases however the process ends: the next call removes
    the folders of processes that were killed.
    """
    _remove_left_over(command)
    with tempfile.TemporaryDirectory(prefix=f"allstep-{command}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{_HOLDER}.new"
        with open(unnamed, "x") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            unnamed.rename(folder / _HOLDER)  # under this name it is locked from the start
            yield folder


def _remove_left_over(command: str) -> None:
    pattern = re.compile(rf"allstep-{command}-\w{{8}}")
    for path in Path(tempfile.gettempdir()).iterdir():
        if pattern.fullmatch(path.name):
            with contextlib.suppress(OSError):  # it belongs to another user, or is being removed
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    """Remove a folder of this user whose process has ended. Raises OSError if it has not."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    descriptor = os.open(path / _HOLDER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
