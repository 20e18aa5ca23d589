"""TensorFlow for GPUs together with torch in one environment: it has its own folder, with its CUDA 12 libraries.

torch's wheels are built for CUDA 13, TensorFlow's for CUDA 12, and the cuDNN wheels for both have the same file names,
so the last one installed would win. But TensorFlow's libraries look for CUDA's libraries next to TensorFlow (their
RUNPATH is ../nvidia/cudnn/lib), and so does XLA for ptxas and libdevice. Therefore TensorFlow and its CUDA libraries
are in .venv/lib/tensorflow-cuda12, and a .pth file in site-packages adds that folder to Python's path. Every program
then finds the right files, without loading libraries or setting variables before the import.

NCCL is shared: torch's NCCL links CUDA's runtime statically, so one build serves both frameworks and Horovod.
"""

import os
import shutil
from pathlib import Path

import this_checkout  # noqa: F401  # first: makes allstep.* importable
from setup_needs import site_packages

FOLDER_NAME = "tensorflow-cuda12"


def folder(environment: Path) -> Path:
    return environment / "lib" / FOLDER_NAME


def tidy_and_link(environment: Path) -> None:
    """Add the folder that pip has filled to Python's path, and remove what would interfere with torch's packages."""
    packages, ours = site_packages(environment), folder(environment)
    # Some wheels of CUDA 12 make `nvidia` a regular package, which would hide the one in site-packages.
    (ours / "nvidia" / "__init__.py").unlink(missing_ok=True)
    shutil.rmtree(ours / "bin")  # scripts that are not on the PATH
    # TensorFlow 2.21 does not search the folder of this library, without which it uses no GPU.
    (ours / "nvidia" / "cublas" / "lib" / "libcusolver.so.11").symlink_to("../../cusolver/lib/libcusolver.so.11")
    nccl = ours / "nvidia" / "nccl"
    nccl.symlink_to(os.path.relpath(packages / "nvidia" / "nccl", nccl.parent))
    (packages / "allstep-tensorflow.pth").write_text(os.path.relpath(ours, packages) + "\n")
