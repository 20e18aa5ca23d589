"""A local HTTP server whose answers each test chooses, and a fixture that writes checksums of a test's files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from allstep.common.files.disk import sha256_of

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers each path with the bytes or the function in `answers`, anything else with 404."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.requests: list[str] = []
        self.closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                server.requests.append(name)
                answer = server.answers.get(name)
                if answer is None:
                    self.send_error(404)
                elif isinstance(answer, bytes):
                    server.send(self, answer)
                else:
                    answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Tests include clients that give up early, which is no error to print.
        self.http.handle_error = lambda *args: None
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def send(self, request: BaseHTTPRequestHandler, body: bytes, *, length: int | None = None) -> None:
        """Answer with `body`, but claim a length of `length` bytes."""
        request.send_response(200)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        request.wfile.write(body)

    def send_slowly(self, request: BaseHTTPRequestHandler, body: bytes, *, piece: int, pause: float) -> None:
        """Answer with `body`, `piece` bytes every `pause` seconds, until the test ends."""
        self.send(request, b"", length=len(body))
        for start in range(0, len(body), piece):
            if self.closing.wait(pause):
                return
            request.wfile.write(body[start : start + piece])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypass any proxy of the machine for the local server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def vouch() -> Callable[[Path], None]:
    """Return a function that writes SHA256SUMS for the files in a folder, as `sha256sum *` would."""

    def write_sums(directory: Path) -> None:
        (directory / "SHA256SUMS").unlink(missing_ok=True)
        files = sorted(path for path in directory.iterdir() if path.is_file())
        (directory / "SHA256SUMS").write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in files))

    return write_sums
