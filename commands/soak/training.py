"""A trainer's job that is started to be disturbed: its ranks, its output, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from allstep.commands.shared.jobs import Job
from allstep.commands.shared.records.runs import FILE, read_events

POLL_SECONDS = 0.002
PATIENCE_SECONDS = 300
# How a launcher gives a rank its number; torchrun first, the others keep to one name each.
_RANK = re.compile(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|HOROVOD_RANK|RANK)=(\d+)\0")


class Training(Job):
    """A job that has been started."""

    def __init__(
        self,
        command: Sequence[object],
        output_dir: Path,
        num_ranks: int,
        log: IO[bytes],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`command` has its launcher in front, where it has one; `output_dir` is the trainer's."""
        self._num_ranks = num_ranks
        self._metrics = output_dir / FILE
        self._before = _inode(self._metrics)
        # Equal runs are equal, bit by bit, only where each gradient travels alone.
        super().__init__([command], log, {"HOROVOD_FUSION_THRESHOLD": "0", **(environ or {})})

    @property
    def process(self) -> subprocess.Popen:
        """The launcher, or the one rank."""
        return self.processes[0]

    def wait_for_step(self, step: int, delay: float = 0.0) -> None:
        """Wait until it has reported `step`, for step 0 until all ranks are there, and then `delay` seconds.

        Raises:
            TimeoutError: it does not come so far.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.status is None and not self._reached(step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not at step {step} after {PATIENCE_SECONDS} s: {self.printed()}")
            time.sleep(POLL_SECONDS)
        time.sleep(delay)

    def signal_rank(self, rank: int, number: int) -> bool:
        """Send a signal to a rank; False where the job has ended before."""
        pid = self.ranks().get(rank)
        if pid is None or self.status is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def signal_launcher(self, number: int) -> bool:
        """Send a signal to the launcher; False where the job has ended before."""
        if self.status is not None:
            return False
        self.process.send_signal(number)
        return True

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks, by rank."""
        if self._num_ranks == 1:
            return {0: self.process.pid}
        return rank_processes(self.process.pid)

    def reported_its_end(self) -> bool:
        """Whether it came to the end of its training."""
        return self._is_own() and bool(read_events(self._metrics).ends)

    def _reached(self, step: int) -> bool:
        if step == 0:
            return len(self.ranks()) == self._num_ranks
        return self._is_own() and last_step(self._metrics.parent) >= step

    def _is_own(self) -> bool:
        """Whether metrics.jsonl is this job's: until it opens its own, the file is that of the run before."""
        return _inode(self._metrics) not in (None, self._before)


@contextmanager
def training(
    command: Sequence[object], output_dir: Path, num_ranks: int, *, environ: Mapping[str, str] | None = None
) -> Iterator[Training]:
    """Start a job; nothing of it is left when the block ends."""
    with tempfile.TemporaryFile() as log:
        run = Training(command, output_dir, num_ranks, log, environ)
        try:
            yield run
        finally:
            run.kill()


def last_step(output_dir: Path) -> int:
    """The last step that metrics.jsonl has; 0 without any."""
    path = output_dir / FILE
    return max((event.step for event in read_events(path).steps), default=0) if path.exists() else 0


def rank_processes(launcher: int) -> dict[int, int]:
    """Process ids of a job's ranks by rank, found among those that descend from its launcher's."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # The parent is the second field after the name, which is in parentheses and may hold anything (proc(5)).
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.name))
    ranks: dict[int, int] = {}
    generation = children.get(launcher, [])
    while generation:
        for pid in generation:
            rank = _rank(pid)
            if rank is not None:
                ranks.setdefault(rank, pid)  # what a rank starts has its environment
        generation = [child for pid in generation for child in children.get(pid, [])]
    return ranks


def _rank(pid: int) -> int | None:
    with suppress(OSError):
        match = _RANK.search(Path(f"/proc/{pid}/environ").read_bytes())
        return int(match[1]) if match else None
    return None


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
