"""TensorFlow for GPUs, beside torch in one environment: a folder of its own that holds its CUDA 12 libraries as well.

torch's wheels are built for CUDA 13, TensorFlow's for CUDA 12, and the cuDNN wheels of both put their files in the same
place: the last one installed would win. But TensorFlow's libraries look for CUDA's beside TensorFlow (their RUNPATH
says ../nvidia/cudnn/lib), and so does XLA for ptxas and libdevice. So TensorFlow and what it needs of CUDA stand in
.venv/lib/tensorflow-cuda12, a line in site-packages puts that folder on Python's path, and every program finds the
right files, with nothing to load or to set before the import.

NCCL is torch's for all: it links CUDA's runtime statically, so that one build serves both, and Horovod is built
against it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from build_horovod import site_packages

FOLDER_NAME = "tensorflow-cuda12"


def folder(environment: Path) -> Path:
    return environment / "lib" / FOLDER_NAME


def tidy_and_link(environment: Path) -> None:
    """Make of the folder that pip has filled one that programs find and that leaves torch's packages alone."""
    packages, ours = site_packages(environment), folder(environment)
    # Some wheels of CUDA 12 make `nvidia` a regular package, which would hide that of site-packages.
    (ours / "nvidia" / "__init__.py").unlink(missing_ok=True)
    shutil.rmtree(ours / "bin")  # scripts that nobody has on the PATH
    # The wheel of TensorFlow 2.21 looks for all of CUDA's libraries but this one, and takes no GPU without it.
    (ours / "nvidia" / "cublas" / "lib" / "libcusolver.so.11").symlink_to("../../cusolver/lib/libcusolver.so.11")
    nccl = ours / "nvidia" / "nccl"
    nccl.symlink_to(os.path.relpath(packages / "nvidia" / "nccl", nccl.parent))
    (packages / "allstep-tensorflow.pth").write_text(os.path.relpath(ours, packages) + "\n")
