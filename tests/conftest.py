"""What holds for every test process, before anything else is imported."""

import gc
import os
import signal

import gpus

gpus.hide()

# What is imported stays: no pass of the garbage collector while tests are collected, nor over it when they run.
gc.disable()

# Both frameworks in one process: TensorFlow after Triton, since the other order crashes it.
import torch._dynamo  # noqa: E402, F401 (torch.optim would import it, and Triton with it, after TensorFlow)
from hypothesis import settings  # noqa: E402

# A shell has what it runs in the background ignore Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` tells the makes below it that they are its own; those that tests start are a user's.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)

# The same examples in every run, and no time asserted: machines are noisy.
settings.register_profile("allstep", derandomize=True, deadline=None)
settings.load_profile("allstep")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
