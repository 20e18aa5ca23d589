"""Settings for every test process, made before anything else is imported."""

import gc
import os
import signal

import gpus

gpus.hide()

# Imported objects are never garbage: do not scan them while tests are collected or run.
gc.disable()

# Both frameworks in one process: TensorFlow after Triton, since the other order crashes it.
import torch._dynamo  # noqa: E402, F401 (torch.optim would import it, and Triton with it, after TensorFlow)
from hypothesis import settings  # noqa: E402

# A shell makes its background jobs ignore Ctrl-C, and the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` passes these to make; a make that a test starts must not take itself for its child.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)

# Use the same examples in every run, and assert no time: machines are noisy.
settings.register_profile("allstep", derandomize=True, deadline=None)
settings.load_profile("allstep")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
