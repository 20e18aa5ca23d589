"""What `common/compat.py` uses of the insides of Python, launchers and frameworks is there. Oracle: they themselves."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run

from allstep.common import compat

KERAS = """
import os, sys
from contextlib import nullcontext
from allstep.common.compat import without_unused_libraries
os.environ["KERAS_BACKEND"] = "tensorflow"
with {context}():
    import keras
unused = {{"sklearn", "scipy", "matplotlib"}}
print(*sorted(unused & sys.modules.keys()))
import scipy
"""


def test_keras_is_imported_without_what_it_does_not_need():
    """And what it is without can be imported afterwards."""
    result = run(sys.executable, "-c", KERAS.format(context="without_unused_libraries"))
    assert (result.returncode, result.stdout) == (0, "\n"), result.stderr


def test_keras_would_import_it():
    """Should it no longer do so, `without_unused_libraries` can go."""
    assert run(sys.executable, "-c", KERAS.format(context="nullcontext")).stdout != "\n"


# What the main thread does time and again while another one looks where it is.
BUSY = {
    "torch": "import torch; work = torch.ones(9, requires_grad=True).sum().backward",
    "tensorflow": "import tensorflow as tf; work = lambda: tf.constant([1.0]) + tf.constant([2.0])",
    "keras": "import keras; layer = keras.layers.Dense(2); work = lambda: layer(keras.ops.ones((1, 2)))",
    "horovod": "import horovod.torch as hvd, torch; hvd.init(); work = lambda: hvd.allreduce(torch.ones(9))",
    "a GPU's number": """
import types
from allstep.tensorflow.strategies.strategy import PendingNumber
slow = types.SimpleNamespace(numpy=lambda: time.sleep(0.01) or 1.0)
work = lambda: float(PendingNumber(slow))""",
    "nobody": "work = lambda: sum(range(9))",
    "nobody's thread": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
work = lambda: pool.submit(time.sleep, 0.01).result()""",
}
LOOK = """
import os, threading, time
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", KERAS_BACKEND="tensorflow")
from allstep.common.compat import is_in_framework
{prepare}
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
    {work}
print(True in seen)
"""


@pytest.mark.parametrize("library", BUSY)
def test_the_main_thread_is_found_in_a_framework(library):
    work = "work(retain_graph=True)" if library == "torch" else "work()"
    result = run(sys.executable, "-c", LOOK.format(prepare=BUSY[library], work=work))
    assert result.stdout.strip() == str(not library.startswith("nobody")), result.stderr


def test_open_mpi_s_daemon_is_known_by_its_name(tmp_path):
    """Open MPI's is a program, not a script that something else runs: the kernel calls it by the name of its file."""
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
