"""Jobs of a trainer that are started to be disturbed: their ranks, output and remaining processes."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from allstep.commands.shared.jobs import Job
from allstep.commands.shared.records.runs import FILE, read_events

POLL_SECONDS = 0.002
PATIENCE_SECONDS = 300
# Variables in which launchers give a rank its number.
_RANK = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")


class Training(Job):
    """A started job of a trainer."""

    def __init__(
        self,
        command: Sequence[object],
        output_dir: Path,
        num_ranks: int,
        log: IO[bytes],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command`, which begins with its launcher if it has one; `output_dir` is the trainer's."""
        self._num_ranks = num_ranks
        self._metrics = output_dir / FILE
        self._before = _inode(self._metrics)
        # Equal runs are equal bit by bit only if each gradient is sent separately.
        super().__init__([command], log, {"HOROVOD_FUSION_THRESHOLD": "0", **(environ or {})})

    @property
    def process(self) -> subprocess.Popen:
        """Process of the launcher, or of the only rank."""
        return self.processes[0]

    def wait_for_step(self, step: int, delay: float = 0.0) -> None:
        """Wait until the job has reported `step` (0: until all ranks are running), and then `delay` seconds.

        Raises TimeoutError if the job does not get so far.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.status is None and not self._reached(step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not at step {step} after {PATIENCE_SECONDS} s: {self.printed()}")
            time.sleep(POLL_SECONDS)
        time.sleep(delay)

    def signal_rank(self, rank: int, number: int) -> bool:
        """Send a signal to a rank; return False if the job has ended before."""
        pid = self.ranks().get(rank)
        if pid is None or self.status is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def signal_launcher(self, number: int) -> bool:
        """Send a signal to the launcher; return False if the job has ended before."""
        if self.status is not None:
            return False
        self.process.send_signal(number)
        return True

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks, by rank."""
        if self._num_ranks == 1:
            return {0: self.process.pid}
        return rank_processes(self.left())

    def reported_its_end(self) -> bool:
        """Return whether the job has reported the end of its training."""
        return self._is_own() and bool(read_events(self._metrics).ends)

    def _reached(self, step: int) -> bool:
        if step == 0:
            return len(self.ranks()) == self._num_ranks
        return self._is_own() and last_step(self._metrics.parent) >= step

    def _is_own(self) -> bool:
        """Return whether metrics.jsonl is this job's; until the job opens it, the file is the previous run's."""
        return _inode(self._metrics) not in (None, self._before)


@contextmanager
def training(
    command: Sequence[object], output_dir: Path, num_ranks: int, *, environ: Mapping[str, str] | None = None
) -> Iterator[Training]:
    """Start a job and kill its processes when the block ends."""
    with tempfile.TemporaryFile() as log:
        run = Training(command, output_dir, num_ranks, log, environ)
        try:
            yield run
        finally:
            run.kill()


def last_step(output_dir: Path) -> int:
    """Return the last step in metrics.jsonl; 0 without any."""
    path = output_dir / FILE
    return max((event.step for event in read_events(path).steps), default=0) if path.exists() else 0


def rank_processes(pids: Iterable[int]) -> dict[int, int]:
    """Return the process ids of a job's ranks, by rank, found among those of the job."""
    import psutil

    started: dict[tuple[float, int], dict[str, str]] = {}
    for pid in pids:
        with suppress(psutil.Error):  # it has ended meanwhile
            process = psutil.Process(pid)
            started[process.create_time(), pid] = process.environ()
    ranks: dict[int, int] = {}
    for (_, pid), environ in sorted(started.items()):  # a rank's children, which inherit its environment, start later
        given = [environ[name] for name in _RANK if name in environ]
        if given:
            ranks.setdefault(int(given[0]), pid)
    return ranks


def words_of(pid: int) -> list[str]:
    """Return the command line of a process, without the -u that torchrun passes to Python; empty if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return [word for word in words if word != "-u"]
    return []


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
