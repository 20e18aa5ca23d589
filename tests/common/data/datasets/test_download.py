"""download: whatever a server answers, a file has the right checksum or does not exist."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import redact_url
from allstep.common.data.datasets import DataConfig, load, prepare
from allstep.common.data.datasets.download import RemoteFile, fetch, print_checksum_source

BODY = bytes(range(256)) * 400
NAME = "data.gz"
FILE = RemoteFile(NAME, len(BODY), hashlib.sha256(BODY).hexdigest())


def fetch_error(directory, *mirrors, timeout=5.0) -> str:
    with pytest.raises(UserError) as caught:
        fetch([FILE], directory, mirrors=mirrors, timeout=timeout)
    message = str(caught.value)
    assert "\n" not in message
    return message


def names_in(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_downloads_once(server, tmp_path):
    server.answers[NAME] = BODY
    directory = tmp_path / "not" / "there"
    for _ in range(2):
        assert fetch([FILE], directory, mirrors=[server.url + "/"]) == {NAME: FILE.sha256}
    assert (directory / NAME).read_bytes() == BODY
    assert names_in(directory) == [NAME] and server.requests == [NAME]


@pytest.mark.parametrize("content", [BODY[:-1], BODY[:-1] + b"x", b""], ids=["partial", "corrupt", "empty"])
def test_a_bad_file_is_replaced(server, tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    server.answers[NAME] = BODY
    fetch([FILE], tmp_path, mirrors=[server.url])
    assert (tmp_path / NAME).read_bytes() == BODY


BAD_ANSWERS = {
    "corrupt": (lambda server, request: server.send(request, BODY[:-1] + b"x"), "SHA-256 is"),
    "short": (lambda server, request: server.send(request, BODY[:99]), "ended after 99 of 102400"),
    "truncated": (lambda server, request: server.send(request, BODY[:99], length=len(BODY)), "99"),
    "html": (lambda server, request: server.send(request, b"<html>Sign in"), "ended after 13 of 102400"),
    "longer": (lambda server, request: server.send(request, BODY + b"x"), "longer than the expected 102400"),
    "404": (lambda server, request: request.send_error(404), "HTTP status 404"),
    "500": (lambda server, request: request.send_error(500), "HTTP status 500"),
    "no HTTP": (lambda server, request: request.wfile.write(b"220 ftp ready\r\n"), "220 ftp ready"),
    "hung up": (lambda server, request: None, "closed connection"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_answer_is_never_used(server, tmp_path, kind):
    answer, reason = BAD_ANSWERS[kind]
    server.answers[NAME] = lambda request: answer(server, request)
    message = fetch_error(tmp_path, server.url)
    assert reason in message and f"{server.url}/{NAME}" in message
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_the_next_mirror_is_asked(server, tmp_path, kind):
    answer, _ = BAD_ANSWERS[kind]
    server.answers[f"first/{NAME}"] = lambda request: answer(server, request)
    server.answers[f"second/{NAME}"] = BODY
    fetch([FILE], tmp_path, mirrors=[f"{server.url}/first", f"{server.url}/second"])
    assert (tmp_path / NAME).read_bytes() == BODY and names_in(tmp_path) == [NAME]


def test_a_bad_file_stays_until_a_good_one_is_there(server, tmp_path):
    (tmp_path / NAME).write_bytes(b"perhaps the user's own")
    message = fetch_error(tmp_path, server.url)
    assert "does not have the published SHA-256" in message
    assert (tmp_path / NAME).read_bytes() == b"perhaps the user's own"


def test_an_endless_answer_is_cut_off(server, tmp_path):
    sent = []

    def endless(request):
        request.send_response(200)
        request.end_headers()
        while not server.closing.is_set():
            request.wfile.write(BODY)
            sent.append(len(BODY))

    server.answers[NAME] = endless
    assert "longer than" in fetch_error(tmp_path, server.url)
    assert sum(sent) < 100 * len(BODY)  # Only the connection's buffers were filled.


def test_a_silent_server_is_given_up(server, tmp_path):
    server.answers[NAME] = lambda request: server.closing.wait()
    assert "stalled for 1 s after 0 of" in fetch_error(tmp_path, server.url, timeout=1)


def test_a_server_that_stops_in_the_middle_is_given_up(server, tmp_path):
    def stop(request):
        server.send(request, BODY[:1000], length=len(BODY))
        server.closing.wait()

    server.answers[NAME] = stop
    assert "stalled for 1 s after 1000 of 102400 bytes" in fetch_error(tmp_path, server.url, timeout=1)
    assert names_in(tmp_path) == []


def test_a_server_that_trickles_is_given_up(server, tmp_path):
    # The server is never silent for the timeout, but would need hours.
    body = BODY[:1000]
    file = RemoteFile(NAME, len(body), hashlib.sha256(body).hexdigest())
    server.answers[NAME] = lambda request: server.send_slowly(request, body, piece=1, pause=0.02)
    with pytest.raises(UserError, match="too slow, got"):
        fetch([file], tmp_path, mirrors=[server.url], timeout=1)
    assert names_in(tmp_path) == []


def test_a_slow_answer_is_waited_for(server, tmp_path):
    server.answers[NAME] = lambda request: server.send_slowly(request, BODY, piece=20_000, pause=0.05)
    fetch([FILE], tmp_path, mirrors=[server.url], timeout=5.0)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_offline_says_which_file_goes_where(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # Bound but not listening: a connection is refused.
        message = fetch_error(tmp_path, f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert f"expected {tmp_path / NAME}, or a mirror" in message and "it is missing and" in message
    assert f"put {NAME} into {tmp_path}" in message
    assert "refused" in message


@pytest.mark.parametrize("mirror", ["example", "nonsense://example", "http://", "http://exa mple/"])
def test_a_mirror_that_is_no_url(tmp_path, mirror):
    assert mirror.rstrip("/") in fetch_error(tmp_path, mirror)


def test_user_password_and_query_are_used_and_not_told(server, tmp_path, capsys):
    """Oracle: RFC 7617, whose example credentials these are."""
    seen = []

    def answer(request) -> None:
        seen.append((request.path, request.headers["Authorization"]))
        server.send(request, BODY)

    server.answers[f"folder/{NAME}?token=s3cret"] = answer
    mirror = server.url.replace("//", "//Aladdin:open%20sesame@") + "/folder/?token=s3cret"
    fetch([FILE], tmp_path, mirrors=[mirror])
    assert seen == [(f"/folder/{NAME}?token=s3cret", "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")]
    message = fetch_error(tmp_path / "other", mirror.replace("folder", "nowhere"))
    printed = message + "".join(capsys.readouterr())
    assert f"{server.url}/nowhere/{NAME}: HTTP status 404" in printed
    assert not any(secret in printed for secret in ("Aladdin", "sesame", "s3cret"))


def test_a_password_does_not_follow_a_redirect(server, tmp_path):
    seen = []

    def redirect(request) -> None:
        request.send_response(302)
        request.send_header("Location", f"{server.url}/elsewhere")
        request.end_headers()

    def answer(request) -> None:
        seen.append(request.headers["Authorization"])
        server.send(request, BODY)

    server.answers.update({NAME: redirect, "elsewhere": answer})
    fetch([FILE], tmp_path, mirrors=[server.url.replace("//", "//user:pass@")])
    assert seen == [None]


@pytest.mark.parametrize(
    ("url", "quote"),
    [
        ("https://host/folder", "https://host/folder"),
        ("https://user:p@ss@host:80/folder?token=1#part", "https://host:80/folder"),
        ("user:pass@host/folder", "host/folder"),
        ("https://host/a@b", "https://host/a@b"),
        ("file:///folder", "file:///folder"),
    ],
)
def test_without_secrets(url, quote):
    assert redact_url(url) == quote


def test_a_folder_as_mirror(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / NAME).write_bytes(BODY)
    fetch([FILE], tmp_path / "to", mirrors=[(tmp_path / "from").as_uri()])
    assert (tmp_path / "to" / NAME).read_bytes() == BODY


def test_a_mirror_whose_file_is_a_fifo(tmp_path):
    (tmp_path / "from").mkdir()
    os.mkfifo(tmp_path / "from" / NAME)
    message = fetch_error(tmp_path / "to", (tmp_path / "from").as_uri())
    assert "expected a regular file, received a FIFO" in message


@pytest.mark.parametrize("name", ["SHA256SUMS", ".lock"])
def test_what_is_no_regular_file_is_not_waited_for(server, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="expected a regular file, received a FIFO"):
        fetch([FILE], tmp_path, mirrors=[server.url])


def test_a_file_of_another_size_is_not_read_to_its_end(server, tmp_path):
    """A sparse file of 40 GB: hashing it would take longer than noticing its wrong size."""
    server.answers[NAME] = BODY
    (tmp_path / NAME).touch()
    os.truncate(tmp_path / NAME, 40 * 10**9)
    fetch([FILE], tmp_path, mirrors=[server.url])
    assert (tmp_path / NAME).read_bytes() == BODY
    os.truncate(tmp_path / NAME, 40 * 10**9)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {NAME}\n")
    with pytest.raises(UserError, match=f"expected .*{NAME} to have at most .* bytes, received 40000000000"):
        fetch([FILE], tmp_path, mirrors=[server.url])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    config = DataConfig(dataset="mnist", data_dir=tmp_path / "file")
    with pytest.raises(UserError, match="received .*: Not a directory; fix that"):
        prepare(config)
    with pytest.raises(UserError, match="is missing on this host"):
        load(config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("dataset", ["mnist", "image-folder"])
def test_a_folder_without_permission(tmp_path, dataset):
    tmp_path.chmod(0)
    for step in (prepare, load):
        with pytest.raises(UserError, match="received .*: Permission denied; fix that"):
            step(DataConfig(dataset=dataset, data_dir=tmp_path / "data"))
    tmp_path.chmod(0o700)


FETCH_IN_A_PROCESS = f"""
import resource, sys
from pathlib import Path
from allstep.common.data.datasets.download import RemoteFile, fetch
from allstep.common.data.datasets.files import data_dir_errors
from allstep.common.base.errors import UserError
url, directory, limit = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    with data_dir_errors(directory):
        fetch([RemoteFile({NAME!r}, {len(BODY)}, {FILE.sha256!r})], Path(directory), mirrors=[url])
except UserError as error:
    print(error)
"""


def start_fetch(server, directory, *, limit=2**30) -> subprocess.Popen:
    arguments = [sys.executable, "-c", FETCH_IN_A_PROCESS, server.url, str(directory), str(limit)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_write_that_fails_leaves_nothing(server, tmp_path):
    # A limit on file size stands in for a full disk: both make write fail in the middle.
    server.answers[NAME] = BODY
    output, _ = start_fetch(server, tmp_path, limit=50_000).communicate()
    assert f"received {tmp_path}: File too large; fix that or choose another --dataset or --data-dir\n" in output
    assert names_in(tmp_path) == []


def test_a_killed_download_leaves_nothing_that_is_used(server, tmp_path):
    half_sent = threading.Event()

    def half(request):
        server.send(request, BODY[:50_000], length=len(BODY))
        half_sent.set()
        server.closing.wait()

    server.answers[NAME] = half
    process = start_fetch(server, tmp_path)
    assert half_sent.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / NAME).exists()
    server.answers[NAME] = BODY
    fetch([FILE], tmp_path, mirrors=[server.url])
    assert (tmp_path / NAME).read_bytes() == BODY and names_in(tmp_path) == [NAME]


def test_processes_at_once_download_once(server, tmp_path):
    server.answers[NAME] = lambda request: server.send_slowly(request, BODY, piece=20_000, pause=0.1)
    processes = [start_fetch(server, tmp_path) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == [""] * 3
    assert [process.returncode for process in processes] == [0] * 3
    assert (tmp_path / NAME).read_bytes() == BODY and names_in(tmp_path) == [NAME]
    assert server.requests == [NAME]


def test_own_files_count_when_vouched_for(server, tmp_path, vouch, capsys):
    (tmp_path / NAME).write_bytes(b"own")
    vouch(tmp_path)
    sums = fetch([FILE], tmp_path, mirrors=[server.url])
    assert sums == {NAME: hashlib.sha256(b"own").hexdigest()}
    print_checksum_source(tmp_path)
    assert "counts instead of the published checksums" in capsys.readouterr().err
    assert server.requests == []


def test_own_files_are_checked_and_never_replaced(server, tmp_path, vouch):
    server.answers[NAME] = BODY
    (tmp_path / NAME).write_bytes(b"own")
    vouch(tmp_path)
    (tmp_path / NAME).write_bytes(b"0wn")
    assert "to have the SHA-256 that SHA256SUMS beside it lists, received another one" in fetch_error(
        tmp_path, server.url
    )
    (tmp_path / NAME).unlink()
    assert "which SHA256SUMS beside it lists, received none" in fetch_error(tmp_path, server.url)
    (tmp_path / "SHA256SUMS").write_text("not a checksum\n\n")
    assert f"expected a line for {NAME} in" in fetch_error(tmp_path, server.url)
    assert server.requests == []
