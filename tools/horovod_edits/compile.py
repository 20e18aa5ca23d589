"""Edits that make Horovod compile against today's PyTorch, TensorFlow, CMake and Python."""

from __future__ import annotations

from horovod_edits.edit import Edit

COMPILE_EDITS = [
    Edit(
        path="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
        reason="TensorFlow's headers need C++17",
    ),
    Edit(
        path="horovod/torch/CMakeLists.txt",
        old="    set(CMAKE_CXX_STANDARD 14)",
        new="    set(CMAKE_CXX_STANDARD 20)",
        reason="the headers of torch 2.14 need C++20",
    ),
    Edit(
        path="third_party/gloo/CMakeLists.txt",
        old="cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        new="cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
        reason="CMake 4 refuses projects that ask for less than 3.5; 3.13 is what Horovod itself asks for",
    ),
    Edit(
        path="horovod/tensorflow/xla_mpi_ops.cc",
        old="#if TENSORFLOW_VERSION >= 2006000000\n",
        new="#if 0  // allstep: needs headers of highwayhash\n",
        reason="its XLA headers include highwayhash, which the wheel of TensorFlow 2.21 lacks",
    ),
    Edit(
        path="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
        reason="Python 3.12 has no distutils",
    ),
    Edit(
        path="cmake/Modules/FindPytorch.cmake",
        old='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        new='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        "if(NOT DEFINED HOROVOD_GPU_OPERATIONS)\n    set(Pytorch_CUDA FALSE)\nendif()\n",
        reason="a CPU build must not switch CUDA on because torch knows CUDA and an nvcc is on the machine",
    ),
    Edit(
        path="CMakeLists.txt",
        old="include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        new="include(CheckLanguage)\nif(DEFINED HOROVOD_GPU_OPERATIONS)\n    check_language(CUDA)\nendif()\n"
        "if(DEFINED HOROVOD_GPU_OPERATIONS AND NOT CMAKE_CUDA_COMPILER)\n",
        reason="a CPU build must not fail on an nvcc that does not work with this compiler",
    ),
    Edit(
        path="CMakeLists.txt",
        old="# Configure path to modules (for find_package)\n",
        new="# Find the libraries of the environment that Horovod is installed in, wherever that is.\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib;$ORIGIN/../../tensorflow;'
        '$ORIGIN/../../nvidia/nccl/lib")\n\n'
        "# Configure path to modules (for find_package)\n",
        reason="a cached wheel is installed in other environments than the one it was built in",
    ),
    Edit(
        path="horovod/tensorflow/mpi_ops.cc",
        old="""\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
""",
        new="""\
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return reinterpret_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
""",
        reason="TensorFlow exports its own AsGpuStreamValue no more, and its stream's header has moved",
    ),
]
