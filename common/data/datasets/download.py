"""Download of a data set's files, each checked against its SHA-256 before use.

A file is written under a temporary name and renamed once its checksum matches, so a killed download leaves
nothing that could be taken for the file. Several processes may fetch at once; one of them downloads.

To use your own files in the format of a data set, put them into its folder and run
`sha256sum FILES > SHA256SUMS` there. These checksums then replace the published ones, and nothing is
downloaded or overwritten.
"""

import base64
import hashlib
import http.client
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from allstep.common.base.errors import UserError, print_line
from allstep.common.config.data_config import redact_url
from allstep.common.data.datasets.files import SUMS_NAME, has_sum, one_at_a_time, read_sums
from allstep.common.files.disk import regular, write_atomically

TIMEOUT_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 10_000
"""A server that is slower than this on average counts as stalled, since other ranks would wait for hours."""
CHUNK_BYTES = 2**16
MAX_OWN_BYTES = 2**30
"""Maximum size of a user's own file; the largest published one has 170 MB."""


@dataclass(frozen=True)
class RemoteFile:
    """Published file of a data set."""

    name: str
    num_bytes: int
    sha256: str


def fetch(
    files: Sequence[RemoteFile], directory: Path, *, mirrors: Sequence[str], timeout: float = TIMEOUT_SECONDS
) -> dict[str, str]:
    """Make sure that `directory` holds all `files`, and return the SHA-256 of each by name.

    Raises UserError if a file is missing and cannot be downloaded, OSError if the folder cannot be read or written.

    Args:
        mirrors: URLs of folders that hold the files, tried in this order.
        timeout: seconds without an answer after which a server counts as stalled.
    """
    sums = expected_sums(files, directory)
    if (directory / SUMS_NAME).exists():
        _check_local_files(sums, directory)
        return sums
    missing = [file for file in files if not _is_there(file, directory / file.name)]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(directory):
            for file in missing:
                _download(file, directory / file.name, mirrors=mirrors, timeout=timeout)
    return sums


def expected_sums(files: Sequence[RemoteFile], directory: Path) -> dict[str, str]:
    """Return the SHA-256 that each file must have, by name: that in the user's SHA256SUMS, else the published one."""
    local_path = directory / SUMS_NAME
    if not local_path.exists():
        return {file.name: file.sha256 for file in files}
    own = read_sums(local_path)
    for file in files:
        if file.name not in own:
            raise UserError(
                f"expected a line for {file.name} in {local_path}, received none; write it again with sha256sum"
            )
    return {file.name: own[file.name] for file in files}


def print_checksum_source(directory: Path) -> None:
    """Print one line to standard error if the user's own checksums were used."""
    if (directory / SUMS_NAME).exists():
        print_line(f"{directory / SUMS_NAME} counts instead of the published checksums", sys.stderr)


def _is_there(file: RemoteFile, path: Path) -> bool:
    # The size is compared first, so that an arbitrarily large file is not hashed.
    return path.exists() and path.stat().st_size == file.num_bytes and has_sum(path, file.sha256)


def _check_local_files(sums: dict[str, str], directory: Path) -> None:
    for name, sha256 in sums.items():
        path = directory / name
        if not path.exists():
            raise UserError(f"expected {path}, which {SUMS_NAME} beside it lists, received none; put the file there")
        if (size := path.stat().st_size) > MAX_OWN_BYTES:
            raise UserError(f"expected {path} to have at most {MAX_OWN_BYTES} bytes, received {size}; replace it")
        if not has_sum(path, sha256):
            raise UserError(
                f"expected {path} to have the SHA-256 that {SUMS_NAME} beside it lists, received another one; replace "
                "either"
            )


class _AnswerError(Exception):
    """Failed download; the message gives the reason."""


def _download(file: RemoteFile, path: Path, *, mirrors: Sequence[str], timeout: float) -> None:
    if _is_there(file, path):
        return  # Another process has downloaded it while this one waited.
    unvouched = f"does not have the published SHA-256, nor is there a {SUMS_NAME} that vouches for it,"
    state = unvouched if path.exists() else "is missing"
    failures = []
    for mirror in mirrors:
        folder, mark, query = mirror.partition("?")
        url = f"{folder.rstrip('/')}/{file.name}{mark}{query}"
        quote = redact_url(url)
        print_line(f"Downloading {quote} ({file.num_bytes / 1e6:.1f} MB)", sys.stderr)
        digest = hashlib.sha256()
        try:
            with write_atomically(path) as stream:
                for chunk in _chunks(url, file.num_bytes, timeout):
                    digest.update(chunk)
                    stream.write(chunk)
                if digest.hexdigest() != file.sha256:
                    raise _AnswerError(f"SHA-256 is {digest.hexdigest()}, expected {file.sha256}")
            return
        except _AnswerError as error:
            failures.append(f"{quote}: {error}")
    raise UserError(
        f"expected {path}, or a mirror that has it, received neither: it {state} and could not be downloaded "
        f"({'; '.join(failures)}); put {file.name} into {path.parent}, or give a --mirror that has it"
    )


def _open(url: str, timeout: float) -> BufferedReader | http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":  # urllib would block on a named pipe
        return open(urllib.request.url2pathname(parts.path), "rb", opener=regular)
    return urllib.request.urlopen(_request(url), timeout=timeout)


def _request(url: str) -> urllib.request.Request:
    """Return the request for `url`, with its user and password, if any, moved to the Authorization header."""
    match = re.fullmatch(r"(https?://)([^/?#]*)@(.*)", url)
    if not match:
        return urllib.request.Request(url)
    request = urllib.request.Request(match[1] + match[3])
    credentials = base64.b64encode(urllib.parse.unquote(match[2]).encode()).decode()
    request.add_unredirected_header("Authorization", f"Basic {credentials}")  # only for this host
    return request


def _chunks(url: str, num_bytes: int, timeout: float) -> Iterator[bytes]:
    """Yield the content of `url`, which must have `num_bytes` bytes, in chunks; errors become `_AnswerError`."""
    deadline = time.monotonic() + timeout + num_bytes / MIN_BYTES_PER_SECOND
    received = 0
    try:
        with _open(url, timeout) as answer:
            # read1 returns the bytes received so far; read would wait for a whole chunk.
            while chunk := answer.read1(CHUNK_BYTES):
                received += len(chunk)
                if received > num_bytes:
                    raise _AnswerError(f"answer is longer than the expected {num_bytes} bytes")
                if time.monotonic() > deadline:
                    raise _AnswerError(f"too slow, got {received} of {num_bytes} bytes")
                yield chunk
    except urllib.error.HTTPError as error:
        raise _AnswerError(f"HTTP status {error.code}") from error
    except TimeoutError as error:
        raise _AnswerError(f"stalled for {timeout:g} s after {received} of {num_bytes} bytes") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The reason may quote the answer, including line breaks, and the URL.
        reason = str(getattr(error, "reason", error)).replace(url, redact_url(url))
        raise _AnswerError(" ".join(reason.split())[:200]) from error
    if received < num_bytes:
        raise _AnswerError(f"answer ended after {received} of {num_bytes} bytes")
