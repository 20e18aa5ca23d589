"""Processes without a job's key can neither harm the job nor execute code, at any port on which it listens.

Oracles: the job's end and curve; files that payloads would create; the kernel's lists of sockets and processes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from horovod.runner.common.util import network, secret
from horovod.runner.common.util.settings import Settings
from horovod.runner.http import http_client, http_server
from jobs import losses
from ranks import REPOSITORY, environment, events, train

pytestmark = pytest.mark.cold

CONTENT, SIGNATURE = "X-Horovod-Content", "X-Horovod-Signature"
GARBAGE = os.urandom(4096)
FIRST_WORDS = (GARBAGE, b"", GARBAGE[:8], b"GET / HTTP/1.1\r\nA: ", b"\x16\x03\x01\x02\x00\x01")


class Payload:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@contextlib.contextmanager
def running(*command: str | Path, **extra: str) -> Iterator[subprocess.Popen]:
    """Run a job, and kill its processes at the end."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env=environment(**extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        for left in processes(process):
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.wait()


def processes(job: subprocess.Popen) -> list[psutil.Process]:
    """Return the launcher's process, then all that it has started."""
    try:
        launcher = psutil.Process(job.pid)
        return [launcher, *launcher.children(recursive=True)]
    except psutil.Error:
        return []


def ranks(job: subprocess.Popen, script: Path) -> list[psutil.Process]:
    """Return the processes of a job that run the script."""
    return [process for process in processes(job) if words_of(process)[1:2] == [str(script)]]


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def listening(found: list[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses on which the processes listen now."""
    addresses: set[tuple[str, int]] = set()
    for process in found:
        with contextlib.suppress(psutil.Error):
            connections = process.net_connections("inet")
            addresses |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
    return addresses


def wait_for(condition: Callable[[], object]) -> object:
    """Return the result of `condition` once it is true."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited for two minutes"
        time.sleep(0.02)
    return found


def wait_for_end(job: subprocess.Popen, *, meanwhile: Callable[[], object] = lambda: None) -> str:
    """Return the output of a job after it has ended."""
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(job.stdout))
    reader.start()
    while reader.is_alive():
        meanwhile()
        reader.join(0.02)
    job.wait()
    return "".join(printed)


def ask(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> int | None:
    """Return the status of the response to a request, or None if there is no response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        return connection.getresponse().status
    except (http.client.HTTPException, ConnectionError):
        return None
    finally:
        connection.close()


def annoy(address: tuple[str, int]) -> list[socket.socket]:
    """Connect and send data that no rank sends, or none, and return the connections that are still open."""
    kept = []
    with contextlib.suppress(OSError):
        for words in FIRST_WORDS:
            kept.append(socket.create_connection(address, timeout=1))
            kept[-1].sendall(words)
        for words in FIRST_WORDS:  # close these by RST
            with socket.create_connection(address, timeout=1) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.sendall(words)
    return kept


LATE = """
import pathlib, time
from allstep.common.process.exit import run_rank
from allstep.common.training.start import start
from allstep.pytorch import train
def main():
    config, place = start(train.strategies)
    while place.rank == 1 and not pathlib.Path({go!r}).exists():
        time.sleep(0.02)
    train.session(config, place).train()
run_rank(main)
"""


def test_a_job_under_gloo_drops_strangers(tmp_path):
    """Connect to the port of rank 0 while it waits for rank 1, and then to each port that is seen open; ports between
    connected ranks are open only for milliseconds.
    """
    flags = ("--global-batch-size", "32", "--epochs", "1", "--log-every", "1")
    script = tmp_path / "late.py"
    script.write_text(LATE.format(go=str(tmp_path / "go")))
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, script, *flags, "--output-dir", tmp_path / "run"]
    with running(*command) as job, contextlib.ExitStack() as connections:
        met: set[tuple[str, int]] = set()

        def meet() -> None:
            """Annoy each listener once."""
            for address in listening(processes(job)) - met:
                met.add(address)
                for connection in annoy(address):
                    connections.enter_context(connection)

        def met_rank_0() -> bool:
            of_launcher = listening(processes(job)[:1])
            meet()
            return bool(met - of_launcher) or job.poll() is not None

        wait_for(met_rank_0)
        (tmp_path / "go").touch()
        printed = wait_for_end(job, meanwhile=meet)
    assert job.returncode == 0, printed
    assert "Traceback" not in printed and "Exception" not in printed, printed
    alone = train("pytorch", "alone", 1, tmp_path / "alone", *flags)
    assert losses(events(tmp_path / "run")) == pytest.approx(losses(alone), rel=1e-4)


STORE = """
import os, pathlib, time
import horovod.torch as hvd, torch
while not pathlib.Path({go!r}).exists():
    time.sleep(0.02)
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == 2
"""
ELASTIC = """
import pathlib, time
import horovod.torch as hvd, torch
hvd.init()
model = torch.nn.Linear(1, 1)
state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=0)
@hvd.elastic.run
def train(state):
    while hvd.size() == 1 or not pathlib.Path({go!r}).exists():
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()
        state.batch += 1
        state.commit()
train(state)
print("trained by", hvd.size(), flush=True)
"""


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed size", "elastic"])
def test_the_rendezvous_hears_only_its_own_ranks(elastic, tmp_path):
    """CVE-2024-10190: Horovod's elastic rendezvous executed any data that was put at /worker_addresses.

    The elastic job, a user's script, grows from one rank to two, and its first rank is notified.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    script = tmp_path / "ranks.py"
    script.write_text((ELASTIC if elastic else STORE).format(go=str(tmp_path / "go")))
    discovery = ("--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}")
    options = ("-np", "1", *discovery) if elastic else ("-np", "2", "--gloo")
    payload = base64.b64encode(pickle.dumps(Payload(tmp_path / "ran")))
    with running("horovodrun", *options, sys.executable, script) as job:
        [(host, port)] = wait_for(lambda: listening(processes(job)[:1]))
        assert host == "127.0.0.1"
        if elastic:
            wait_for(lambda: listening(ranks(job, script)))  # its port for notifications
        hosts.write_text("localhost:2\n")
        wait_for(lambda: len(ranks(job, script)) == 2)
        answers = {
            (method, path): ask(port, method, path, body)
            for method, path, body in [
                ("PUT", "/worker_addresses/h:0", payload),
                ("PUT", "/global/0", b"x"),
                ("GET", "/global/0", None),
                ("GET", "/rank_and_size/localhost:0", None),
                ("DELETE", "/global/0", None),
                ("GET", "/", None),
            ]
        }
        assert set(answers.values()) == {403}, answers
        assert ask(port, "HEAD", "/README.md", None) != 200  # it used to serve the current folder
        for path in ("/worker_addresses/h:0", "/global/0"):
            assert ask(port, "PUT", path, payload, {SIGNATURE: "0" * 64}) == 403
            assert ask(port, "PUT", path, b"", {SIGNATURE: "0" * 64, "Content-Length": "99999999999"}) == 403
        quote = [words_of(process) for process in processes(job)]
        [key] = {rank.environ()["HOROVOD_JOB_KEY"] for rank in ranks(job, script)}
        assert len(key) == 64 and key not in str(quote)
        (tmp_path / "go").touch()
        printed = wait_for_end(job)
    assert job.returncode == 0, printed
    assert "Traceback" not in printed, printed
    assert printed.count("trained by 2") == (2 if elastic else 0), printed
    assert not (tmp_path / "ran").exists()


def test_a_signature_holds_for_its_request_alone(monkeypatch):
    """Test Horovod's server with its client, and with requests that were modified after they were signed."""
    monkeypatch.setenv("HOROVOD_JOB_KEY", "k" * 64)
    server = http_server.KVStoreServer(verbose=0)
    port = server.start_server("127.0.0.1")
    try:
        http_client.put_data_into_kvstore("127.0.0.1", port, "scope", "key", ["value"])
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key") == ["value"]

        body = base64.b64encode(pickle.dumps("another"))
        content = hashlib.sha256(body).hexdigest()
        signed = {CONTENT: content, SIGNATURE: secret.sign("PUT", "/scope/key", len(body), content)}
        assert ask(port, "PUT", "/scope/other", body, signed) == 403
        assert ask(port, "DELETE", "/scope/key", body, signed) == 403
        assert ask(port, "PUT", "/scope/key", body + b"A", signed) == 403
        assert ask(port, "PUT", "/scope/key", bytes(len(body)), signed) == 403
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key") == ["value"]
        assert ask(port, "PUT", "/scope/key", body, signed) == 200
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key") == "another"

        monkeypatch.setenv("HOROVOD_JOB_KEY", "l" * 64)
        assert ask(port, "PUT", "/scope/key", body, signed) == 403
    finally:
        server.shutdown_server()


def test_a_reply_that_is_not_signed_is_not_unpickled(monkeypatch, tmp_path):
    """Another process may listen on the former port of the store of functions."""
    monkeypatch.setenv("HOROVOD_JOB_KEY", "k" * 64)
    payload = base64.b64encode(pickle.dumps(Payload(tmp_path / "ran")))

    def impostor() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(RuntimeError, match="not signed"):
            http_client.read_data_from_kvstore("127.0.0.1", listener.getsockname()[1], "runfunc", "func")
        thread.join()
    assert not (tmp_path / "ran").exists()


def test_services_drop_strangers(capfd, tmp_path):
    """Test the base class of the services of the driver, the tasks and elastic ranks."""
    key = secret.make_secret_key()
    service = network.BasicService("service", key, nics=["lo"])
    assert listening([psutil.Process()]) >= {("127.0.0.1", service.get_port())}
    with contextlib.ExitStack() as connections:
        for connection in annoy(("127.0.0.1", service.get_port())):
            connections.enter_context(connection)
        message = pickle.dumps(Payload(tmp_path / "ran"))
        digest = secret.compute_digest(b"another key", message)
        for words in (digest + struct.pack("i", len(message)) + message, bytes(32) + struct.pack("i", -1)):
            with socket.create_connection(("127.0.0.1", service.get_port())) as connection:
                connection.sendall(words)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        client = network.BasicClient("service", service.addresses(), key, verbose=0)
        assert client.addresses()
        ended = threading.Thread(target=service.shutdown, daemon=True)
        ended.start()
        ended.join(20)
        assert not ended.is_alive()  # although strangers are still connected
    assert not (tmp_path / "ran").exists()
    assert capfd.readouterr().err == ""


def test_settings_in_a_command_line_leave_the_key_at_home():
    """horovodrun passes its settings in command lines to its helpers on other hosts."""
    settings = pickle.loads(pickle.dumps(Settings(num_proc=2, key=b"k" * 32)))
    assert (settings.num_proc, settings.key) == (2, None)


def test_the_hmac_of_the_ranks_is_python_s(tmp_path):
    """Oracle: hashlib and hmac, for all lengths around the block size of 64 bytes."""
    (tmp_path / "main.cc").write_text(
        "#include <algorithm>\n#include <iostream>\n"
        f'#include "{REPOSITORY}/commands/horovod/patches/inserted/hmac_sha256.h"\n'
        "using namespace horovod::common;\n"
        "int main() { for (int n = 0; n < 200; ++n) { std::string text(n, char(255 - n));\n"
        'std::cout << Hex(Sha256(text)) << " " << HmacSha256("key", text) << "\\n"; } }\n'
    )
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "main.cc", "-o", "main"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    texts = [bytes([255 - n]) * n for n in range(200)]
    expected = [f"{hashlib.sha256(t).hexdigest()} {hmac.new(b'key', t, 'sha256').hexdigest()}" for t in texts]
    assert printed.splitlines() == expected
