"""The profiler of --profile: torch.profiler. `tensorflow/profiler.py` is the same for TensorFlow."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from allstep.common.training.profiling import WAIT, patched

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


class Profiler:
    """Records operators of the CPU and kernels of the GPU; see `common.training.profiling.Profiler`."""

    suffix = ".pt.trace.json.gz"  # TensorBoard's plugin for PyTorch looks for it

    def start(self, session: TrainingRun, folder: Path) -> None:
        has_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        self._wait_for_device = torch.cuda.synchronize if has_gpu else lambda: None
        self._restore: Callable[[], None] = lambda: None
        if reduction := getattr(session.strategy, "reduction", None):
            self._restore = patched(reduction, "wait", self._recorded)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _recorded(self, wait: Callable) -> Callable:
        @functools.wraps(wait)
        def recorded(*arguments: Any) -> Any:
            with self.span(WAIT):
                return wait(*arguments)

        return recorded

    def stop(self) -> None:
        self._wait_for_device()
        self._profile.stop()
        self._restore()

    def span(self, name: str) -> AbstractContextManager:
        return torch.profiler.record_function(name)

    def events(self, path: Path) -> Sequence[Mapping[str, Any]]:
        self._profile.export_chrome_trace(str(path))
        with gzip.open(path, "rb") as stream:
            return json.load(stream)["traceEvents"]
