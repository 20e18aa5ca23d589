"""Internals of Python, launchers and frameworks that `common/base/compat.py` uses. Oracle: the installed versions."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run

from allstep.common.base import compat

pytestmark = pytest.mark.cold

KERAS = """
import os, sys
from allstep.common.base.compat import without_unused_libraries
os.environ["KERAS_BACKEND"] = "tensorflow"
with without_unused_libraries():
    import keras
unused = {"sklearn", "scipy", "matplotlib"}
print(*sorted(unused & sys.modules.keys()))
import scipy
"""


def test_keras_is_imported_without_what_it_does_not_need():
    """Keras does not import them (see tests/tensorflow/test_compat.py), and they can still be imported afterwards."""
    result = run(sys.executable, "-c", KERAS)
    assert (result.returncode, result.stdout) == (0, "\n"), result.stderr


# Work that the main thread repeats while another thread looks at its stack.
BUSY = {
    "PyTorch": """
import horovod.torch as hvd, torch
total = torch.ones(9, requires_grad=True).sum()
look_at("torch", lambda: total.backward(retain_graph=True))
hvd.init()
look_at("horovod", lambda: hvd.allreduce(torch.ones(9)))
""",
    "TensorFlow": """
import types
with lean_import():
    import keras, tensorflow as tf
    from allstep.tensorflow.strategies.strategy import PendingNumber
look_at("tensorflow", lambda: tf.constant([1.0]) + tf.constant([2.0]))
layer = keras.layers.Dense(2)
look_at("keras", lambda: layer(keras.ops.ones((1, 2))))
slow = types.SimpleNamespace(numpy=lambda: time.sleep(0.01) or 1.0)
look_at("a GPU's number", lambda: float(PendingNumber(slow)))
""",
    "nobody": """
from concurrent.futures import ThreadPoolExecutor
look_at("nobody", lambda: sum(range(9)))
pool = ThreadPoolExecutor(1)
look_at("nobody's thread", lambda: pool.submit(time.sleep, 0.01).result())
""",
}
LOOK = """
import os, threading, time
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", KERAS_BACKEND="tensorflow")
from allstep.common.base.compat import is_in_framework
from allstep.common.process.lean_import import lean_import

def look_at(name, work):
    seen, is_over = set(), threading.Event()
    def look():
        for _ in range(500):
            seen.add(is_in_framework())
            time.sleep(0.0005)
            if True in seen:
                break
        is_over.set()
    threading.Thread(target=look).start()
    while not is_over.is_set():
        work()
    print(f"{name}: {True in seen}")
"""


@pytest.mark.parametrize("library", BUSY)
def test_the_main_thread_is_found_in_a_framework(library):
    result = run(sys.executable, "-c", LOOK + BUSY[library])
    expected = BUSY[library].count("look_at"), {str(library != "nobody")}
    found = [line.rpartition(": ")[2] for line in result.stdout.splitlines()]
    assert (len(found), set(found)) == expected, result.output


def test_a_backward_pass_may_wait_for_other_ranks():
    """DistributedDataParallel reduces gradients in it; a hook runs in it, on the main thread."""
    weight, seen = torch.ones(1, requires_grad=True), []
    weight.register_hook(lambda gradient: seen.append(compat.is_in_collective()))
    weight.sum().backward()
    assert seen == [True] and not compat.is_in_collective()


def test_open_mpi_s_daemon_is_known_by_its_name(tmp_path):
    """Open MPI's daemon is a binary, not a script of an interpreter: the kernel names its process after its file."""
    daemon = Path(sys.prefix, "bin", "orted")
    assert daemon.read_bytes().startswith(b"\x7fELF")
    cat = shutil.which("cat")
    shutil.copy(cat, tmp_path / daemon.name)
    for program, is_daemon in ((tmp_path / daemon.name, True), (cat, False)):
        with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"  # it runs
            assert compat.is_open_mpi_daemon(process.pid) == is_daemon
    with pytest.raises(OSError):
        compat.is_open_mpi_daemon(process.pid)


def test_argparse_takes_words_with_a_hyphen_for_values():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate")
    with pytest.raises(SystemExit):
        parser.parse_args(["--rate", "-inf"])
    compat.take_for_values(parser, "-(inf|nan)")
    assert parser.parse_args(["--rate", "-INF"]).rate == "-INF"


def test_argparse_knows_its_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", "-r")
    parser.add_argument("word")
    assert set(compat.flag_names(parser)) == {"-h", "--help", "--rate", "-r"}


def test_a_service_of_horovod_that_does_not_poll_answers():
    from horovod.runner.common.util import secret
    from horovod.runner.elastic.worker import (
        WorkerNotificationClient,
        WorkerNotificationManager,
        WorkerNotificationService,
    )

    class Listener:
        def on_hosts_updated(self, *change: int) -> None:
            heard.append(change)

    heard, manager, key = [], WorkerNotificationManager(), secret.make_secret_key()
    manager.register_listener(Listener())
    service = WorkerNotificationService(key, None, manager)
    compat.wait_without_polling(service)
    WorkerNotificationClient(service.addresses(), key, 0).notify_hosts_updated(7, 1)
    assert heard == [(7, 1)]
