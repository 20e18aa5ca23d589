"""Files that NVIDIA's libraries are loaded from. Oracles: /proc maps in the kernel's format, and fake libraries."""

from __future__ import annotations

import _ctypes
import shutil
import subprocess
import sys

from allstep.common.process.installation import LIBRARIES, libraries_in, loaded_twice

MAPS = """\
55d0c0a00000-55d0c0a01000 r--p 00000000 fe:00 1311  /venv/bin/python3.11
7f0000000000-7f0000001000 r--p 00000000 fe:00 1312  /venv/nvidia/cudnn/lib/libcudnn.so.9
7f0000001000-7f0000002000 r-xp 00001000 fe:00 1312  /venv/nvidia/cudnn/lib/libcudnn.so.9
7f0000002000-7f0000003000 r-xp 00000000 fe:00 1313  /venv/nvidia/cudnn/lib/libcudnn_ops.so.9
7f0000003000-7f0000004000 r-xp 00000000 fe:00 1314  /a place/nvidia/cublas/lib/libcublas.so.12
7f0000004000-7f0000005000 r-xp 00000000 fe:00 1315  /venv/nvidia/cublas/lib/libcublasLt.so.12 (deleted)
7f0000005000-7f0000006000 r-xp 00000000 fe:00 1316  /venv/nvidia/cu13/lib/libcublas.so.13
7f0000005000-7f0000006000 r-xp 00000000 fe:00 1317  /venv/torchvision.libs/libnvjpeg.36e11081.so.13
7f0000006000-7f0000007000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0     [vdso]
"""


def test_each_library_has_its_files_once():
    assert libraries_in(MAPS) == {
        "cuDNN": ["/venv/nvidia/cudnn/lib/libcudnn.so.9"],
        "cuBLAS": ["/a place/nvidia/cublas/lib/libcublas.so.12", "/venv/nvidia/cu13/lib/libcublas.so.13"],
        "cuBLASLt": ["/venv/nvidia/cublas/lib/libcublasLt.so.12"],
        "nvJPEG": ["/venv/torchvision.libs/libnvjpeg.36e11081.so.13"],
    }


def test_two_versions_are_noticed():
    assert list(loaded_twice(libraries_in(MAPS))) == ["cuBLAS"]
    assert loaded_twice(libraries_in("")) == {}


def test_what_a_process_has_loaded(tmp_path):
    """Copies of a Python library have the names of NVIDIA's libraries."""
    files = [tmp_path / "libnccl.so.2", tmp_path / "libcudart.so.12", tmp_path / "other" / "libcudart.so.13"]
    files[-1].parent.mkdir()
    for file in files:
        shutil.copy(_ctypes.__file__, file)
    program = (
        "import ctypes, sys\n"
        "from allstep.common.process.installation import loaded_libraries\n"
        "before = loaded_libraries()\n"
        "kept = [ctypes.CDLL(file) for file in sys.argv[1:]]\n"
        "print(before, loaded_libraries())\n"
    )
    result = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=True)
    runtimes = sorted(str(file) for file in files[1:])
    assert result.stdout == f"{ {} } { {'CUDA runtime': runtimes, 'NCCL': [str(files[0])]} }\n"


def test_every_library_has_a_name_of_its_own():
    assert len(set(LIBRARIES.values())) == len(LIBRARIES)
