"""Self-test of an installed Horovod: all-reduce on two real ranks, in each of its frameworks, over MPI and Gloo.

    python -m allstep.commands.horovod.self_test
    python -m allstep.commands.horovod.self_test --gpu      # then on GPUs, by NCCL, if there are any

In the test on CPUs, GPUs are hidden, since two ranks may not share one.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from allstep.common.launch.versions import read_build
from allstep.common.process.requirements import FRAMEWORK_PACKAGES

TIMEOUT_S = 600  # a login node may be slow, and the build before it has taken minutes
NUM_RANKS = 2
HOROVODRUN = sysconfig.get_path("scripts") + "/horovodrun"
FEATURES = {"mpi": "MPI", "gloo": "Gloo"}
"""Library that a controller of horovodrun needs."""
PRELUDE = "from allstep.common.process.lean_import import lean_import"
"""Line before each program of a rank: without it, importing TensorFlow takes twice as long."""
RANK_PROGRAMS = {
    "pytorch": """
with lean_import():
    import horovod.torch as hvd, torch
hvd.init()
if GPU:
    torch.cuda.set_device(hvd.local_rank())
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0, device="cuda" if GPU else "cpu"), op=hvd.Sum)
assert total.is_cuda == GPU, total.device
""",
    "tensorflow": """
with lean_import():
    import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
if GPU:
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
with tf.device("/GPU:0" if GPU else "/CPU:0"):
    total = hvd.allreduce(tf.fill((1000,), hvd.rank() + 1.0), op=hvd.Sum)
assert ("GPU" in total.device) == GPU, total.device
total = total.numpy()
""",
}
# The sum of rank + 1 over all ranks.
CHECK = """
assert hvd.size() == NUM_RANKS, hvd.size()
assert (total == sum(range(1, hvd.size() + 1))).all(), total
if GPU:
    assert hvd.nccl_built()
    from allstep.common.process.installation import loaded_libraries, loaded_twice
    assert not loaded_twice(loaded_libraries()), loaded_twice(loaded_libraries())
"""
# PyTorch's count includes GPUs whose driver is too old, hence is_available().
COUNT_GPUS = """
try:
    import torch
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
except ImportError:
    import tensorflow
    print(len(tensorflow.config.list_physical_devices("GPU")))
"""


def run_ranks(framework: str, *, num_ranks: int, controller: str, gpu: bool) -> None:
    """Run the program of a framework under horovodrun, and exit this process if it fails."""
    where = f"by NCCL, GPUs: {num_ranks}" if gpu else f"on {num_ranks} ranks under {controller}"
    what = f"{FRAMEWORK_PACKAGES[framework]} {where}"
    program = f"{PRELUDE}\nGPU, NUM_RANKS = {gpu}, {num_ranks}{RANK_PROGRAMS[framework]}{CHECK}"
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    try:
        result = subprocess.run(
            [HOROVODRUN, "-np", str(num_ranks), f"--{controller}", sys.executable, "-c", program],
            # PYTHONOPTIMIZE would leave out the checks.
            env=os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONOPTIMIZE": ""} | hidden,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{what} did not end within {TIMEOUT_S} s")
    if result.returncode != 0:
        print(result.stdout)
        sys.exit(f"{what} ended with status {result.returncode}")
    print(f"ok: {what}", flush=True)


def command(python: Path, *options: str) -> list[str]:
    """Return the command of this test in the environment of an interpreter."""
    return [str(python), "-m", "allstep.commands.horovod.self_test", *options]


def progress(line: str) -> str | None:
    """Return a line that says what was tested."""
    return line if line.startswith(("ok:", "not tried:")) else None


def on_cpus(controllers: list[str]) -> None:
    """Run the test in each framework under each of the controllers, mpi and gloo, that Horovod was built with."""
    has = read_build()
    usable = [name for name in controllers if has and FEATURES[name] in has.features]
    if not (has and has.versions and usable):
        sys.exit("this Horovod was built for no framework, or without what starts ranks")
    for framework in has.versions:
        for controller in usable:
            run_ranks(framework, num_ranks=NUM_RANKS, controller=controller, gpu=False)


def on_gpus() -> None:
    """Run the test on at most two GPUs with NCCL, or print that there is none, e.g. on a login node."""
    counted = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, check=True)
    num_gpus = int(counted.stdout.split()[-1])
    if num_gpus == 0:
        print("not tried: GPUs, none of which can be used here", flush=True)
        return
    has = read_build()
    for framework in has.versions if has else ():
        run_ranks(framework, num_ranks=min(NUM_RANKS, num_gpus), controller="mpi", gpu=True)


if __name__ == "__main__":
    on_cpus(["gloo"] if "--gloo" in sys.argv else ["mpi", "gloo"])
    if "--gpu" in sys.argv:
        on_gpus()
