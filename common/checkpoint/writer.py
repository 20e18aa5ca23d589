"""Writer of checkpoints in the background, which keeps the last few and the best."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.base.resources import available_memory
from allstep.common.checkpoint import directories, files, select
from allstep.common.checkpoint import manifest as manifests
from allstep.common.checkpoint.lock import OutputDirectory
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.checkpoint.state import TrainState, content_of
from allstep.common.files.disk import NO_ROOM

# For larger states, one thread does not use the full memory bandwidth; for smaller ones, a second thread does not pay.
SHARED_BYTES = 16 * 2**20
# Between attempts to write a checkpoint after an error of the disk; doubled up to the maximum.
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0


class Checkpoints:
    """Checkpoints of a run, in `checkpoints/` of its locked output directory. Only rank 0 has one.

    `keep` is the number of latest checkpoints to keep, in addition to the best by metric; `constants` are the names of
    arrays that may hold nan and infinity. Raises UserError if the directory cannot be written.
    """

    def __init__(self, output: OutputDirectory, *, keep: int = 3, constants: Container[str] = ()) -> None:
        self.directory: Path = output.path / "checkpoints"
        target = self.directory.resolve()
        if not target.is_relative_to(output.path.resolve()):
            raise UserError(
                f"{self.directory} is a link to {target}, where checkpoints of another run may be deleted; "
                "remove the link, or link the whole --output-dir"
            )
        self._output, self._keep, self._constants = output, keep, constants
        self._buffers: dict[str, np.ndarray] = {}  # copies being written, reused by later saves
        self._layout: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # shapes and types of the buffers
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None
        self._is_awaited = threading.Event()  # the training loop waits for the write
        try:
            self.directory.mkdir(exist_ok=True)
            directories.sync(self.directory.parent)  # the directory survives a power cut
            if not os.access(self.directory, os.W_OK):
                raise PermissionError("it is protected from writing")
            directories.clean_up(self.directory)
        except OSError as error:
            raise UserError(f"checkpoints directory {self.directory} cannot be written: {error}") from None
        written, _ = select.scan(self.directory)
        self._next_sequence = written[-1][1].sequence + 1 if written else 1

    def reserve(self, arrays: dict[str, np.ndarray]) -> None:
        """Allocate memory for states with arrays like these, in the background.

        This is optional, and best called before the first step: the first access to new memory takes several times as
        long as the copy, for which training would otherwise wait at the first save.
        """
        self.wait()
        if self._has_buffers(arrays):
            self._pending = self._writer.submit(self._fill, arrays, deque(arrays))

    def save(self, state: TrainState, *, metric: float | None = None) -> None:
        """Copy `state`, which may be changed afterwards, and write it in the background.

        It first waits until the previous save is written. A save that the disk refuses is told at once, and tried again
        until then. If there is not enough memory for a copy, it returns only when the state is written. `metric` is the
        metric of a validation of this state, if there was one. Raises UserError if the previous save failed (a full
        disk, nan or inf in its arrays, ...), or a checkpoint cannot hold an array's dtype; TypeError if a field other
        than the arrays has values that JSON cannot hold. Complete checkpoints are not affected.
        """
        self.wait()
        has_buffers = self._has_buffers(state.arrays)
        manifest = Manifest(
            sequence=self._next_sequence,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            metric=None if metric is None else float(metric),
            files={},
            **content_of(state),
        )
        # Values that a checkpoint cannot hold fail here, not in the background.
        manifest = manifests.copied(manifest)
        self._next_sequence += 1
        if has_buffers:
            arrays = self._copy(state.arrays)
            self._is_awaited.clear()
            self._pending = self._writer.submit(self._write_in_background, arrays, manifest)
        else:
            self._write(state.arrays, manifest)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises UserError if the last write failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._is_awaited.set()
            pending.result()

    def close(self) -> None:
        """Wait for the last write, and end the background thread. Raises the errors of `wait`."""
        self._is_awaited.set()
        self._writer.shutdown()
        self.wait()

    def _has_buffers(self, arrays: dict[str, np.ndarray]) -> bool:
        """Check `arrays` and allocate buffers for a copy; return whether there is enough memory for them."""
        layout = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if layout == self._layout:  # from the second save on
            return True
        files.check_arrays(arrays)
        kept = {name: self._buffers[name] for name in layout if layout[name] == self._layout.get(name)}
        missing = sum(array.nbytes for name, array in arrays.items() if name not in kept)
        # The other half is for prefetched batches, and for the page cache, which makes the write fast.
        if missing > available_memory() // 2:
            return False
        new = {name: np.empty(*kind) for name, kind in layout.items() if name not in kept}
        self._layout, self._buffers = layout, kept | new
        return True

    def _copy(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a copy of `arrays`; for a large state, this thread and the writer's share the work."""
        left = deque(arrays)
        helper = None
        if sum(array.nbytes for array in arrays.values()) >= SHARED_BYTES:
            helper = self._writer.submit(self._fill, arrays, left)
        self._fill(arrays, left)
        if helper and not helper.cancel():  # cancelled if it has not started yet
            helper.result()
        return self._buffers

    def _fill(self, arrays: dict[str, np.ndarray], left: deque[str]) -> None:
        """Copy arrays until `left`, the queue of names that threads share, is empty."""
        with contextlib.suppress(IndexError):
            while True:
                name = left.popleft()
                np.copyto(self._buffers[name], arrays[name])

    def _write_in_background(self, arrays: dict[str, np.ndarray], manifest: Manifest) -> None:
        """Write a checkpoint; after an error of the disk, try again until the training loop waits for it."""
        seconds, has_failed = _FIRST_RETRY_SECONDS, False
        while True:
            try:
                self._write(arrays, manifest)
                break
            except _NotSaved as error:
                if self._is_awaited.is_set():
                    raise
                if not has_failed:
                    self._output.warn(f"{error.what}: {error.fix}; it is tried again until the next save")
            has_failed = True
            self._is_awaited.wait(seconds)
            seconds = min(2 * seconds, _MAX_RETRY_SECONDS)
        if has_failed:
            self._output.warn(f"the checkpoint of step {manifest.progress.step} is saved now")

    def _write(self, arrays: dict[str, np.ndarray], manifest: Manifest) -> None:
        from safetensors import SafetensorError

        directory = self.directory / files.checkpoint_name(manifest.progress.step)
        files.check_finite(arrays, but=self._constants)
        self._output.check_is_same()
        try:
            files.write(directory, arrays, manifest, constants=self._constants)
            self._output.check_is_same()
            for path in expired(select.scan(self.directory)[0], keep=self._keep):
                directories.remove(path)
        except (OSError, SafetensorError) as error:
            megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
            fix = "make room" if any(os.strerror(number) in str(error) for number in NO_ROOM) else "fix that"
            what = f"checkpoint {directory} ({megabytes:.1f} MB) could not be saved: {error}"
            raise _NotSaved(what, fix, is_first=not select.scan(self.directory)[0]) from None


class _NotSaved(UserError):
    """Error for a checkpoint that the disk has refused."""

    def __init__(self, what: str, fix: str, *, is_first: bool) -> None:
        self.what, self.fix = what, fix
        rest = f"{fix}, then start again"
        if not is_first:
            rest = f"the checkpoints before it are unharmed: {fix}, then --resume latest"
        super().__init__(f"{what}; {rest}")


def expired(checkpoints: list[tuple[Path, Manifest]], *, keep: int) -> Iterable[Path]:
    """Return the checkpoints to delete: all but the last `keep` and the best.

    `checkpoints` are in the order of `select.scan`, which leaves out those with an unreadable manifest: they are never
    deleted.
    """
    best = [path for path, _ in select.best_of(checkpoints)[:1]]
    return [path for path, _ in checkpoints[:-keep] if path not in best]
