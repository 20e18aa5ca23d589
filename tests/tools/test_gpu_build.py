"""The build for GPUs, on a machine with or without one: a fake driver stands in for NVIDIA's.

    make setup GPU=1 && .venv/bin/python -m pytest -m full tests/tools/test_gpu_build.py

The oracle is the files that the dynamic loader has mapped. tools/gpu_check.sh tests what GPUs compute.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not json.loads(Path(sys.prefix, "allstep-setup.json").read_text())["gpu"], reason="this .venv is for CPUs"
    ),
]

# The functions of a driver that TensorFlow calls before it opens CUDA's libraries.
DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuDeviceGetName(char* name, int size, int device) { *name = 0; return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuGetErrorName(int error, const char** name) { *name = "none"; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "none"; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = *active = 0; return 0; }
"""
MANAGEMENT = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { strncpy(text, "580.95.05", size); return 0; }
"""
LOADED = "from allstep.common.process.installation import loaded_libraries\nprint(loaded_libraries())\n"
TENSORFLOW = "import tensorflow as tf\nassert tf.config.list_physical_devices('GPU')\n" + LOADED


def printed(program: str, **environ: str) -> str:
    command = [sys.executable, "-c", program]
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | environ
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def folders_of(libraries: dict[str, list[str]]) -> dict[str, str]:
    """Return the folder of each library, relative to the environment's lib/; each has one file."""
    folders = {}
    for name, (path,) in libraries.items():
        folders[name] = str(Path(path).parent.relative_to(Path(sys.prefix, "lib")))
    return folders


def test_tensorflow_finds_cuda_12_in_its_own_folder(tmp_path):
    for name, source in {"libcuda.so.1": DRIVER, "libnvidia-ml.so.1": MANAGEMENT}.items():
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / name], input=source, text=True, check=True
        )
    libraries = ast.literal_eval(printed(TENSORFLOW, LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="0"))
    for stand_in in ("driver", "NVML"):
        assert Path(libraries.pop(stand_in)[0]).parent == tmp_path
    own = "tensorflow-cuda12/nvidia"
    assert folders_of(libraries) == {
        "CUDA runtime": f"{own}/cuda_runtime/lib",
        "cuDNN": f"{own}/cudnn/lib",
        "cuBLAS": f"{own}/cublas/lib",
        "cuBLASLt": f"{own}/cublas/lib",
        "cuFFT": f"{own}/cufft/lib",
        "cuSOLVER": f"{own}/cusolver/lib",
        "cuSPARSE": f"{own}/cusparse/lib",
        "nvJitLink": f"{own}/nvjitlink/lib",
    }


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_horovod_resolves_every_symbol_and_takes_the_one_nccl(framework):
    """The libraries are linked with -z now: an unresolved symbol fails the import."""
    libraries = ast.literal_eval(printed(f"import horovod.{framework} as hvd\nassert hvd.nccl_built()\n{LOADED}"))
    folders = folders_of(libraries)
    assert folders["NCCL"].endswith("/site-packages/nvidia/nccl/lib")
    cuda_12 = {name for name, folder in folders.items() if folder.startswith("tensorflow-cuda12")}
    assert bool(cuda_12) == (framework == "tensorflow")
    assert framework == "torch" or set(folders) - cuda_12 == {"NCCL"}


def test_horovod_opens_the_driver_by_the_name_that_containers_have():
    """A fake driver cannot run an all-reduce, so the oracle is the name in the library."""
    [library] = Path(sys.prefix).glob("lib/*/site-packages/horovod/torch/mpi_lib_v2*.so")
    assert b"\0libcuda.so.1\0" in (content := library.read_bytes()) and b"\0libcuda.so\0" not in content
