"""Untrusted files are read whole, or refused without waiting; their JSON is parsed as the standard says."""

from __future__ import annotations

import json
import os

import pytest
from hostile_files import a_socket, endless, sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.base.resources import left_in_control_groups
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular, regular

KINDS = {"a FIFO": os.mkfifo, "a socket": a_socket, "a character device": endless, "a directory": os.mkdir}


@pytest.mark.parametrize("mode", ["rb", "ab"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path, kind, mode):
    """Opening a FIFO that has no writer, or no reader, would block."""
    KINDS[kind](tmp_path / "file")
    with pytest.raises(OSError) as error, open(tmp_path / "file", mode, opener=regular):
        pass
    if (kind, mode) != ("a directory", "ab"):  # the kernel itself refuses to write to a directory
        assert error.value.strerror == f"expected a regular file, received {kind}"


def test_links_are_followed_and_new_files_made(tmp_path):
    with open(tmp_path / "file", "wb", opener=regular) as stream:
        stream.write(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", maximum=7) == b"content"


def test_no_more_is_read_than_allowed(tmp_path, monkeypatch):
    sparse(tmp_path / "file")
    with pytest.raises(OSError) as error:
        read_regular(tmp_path / "file", maximum=100)
    assert error.value.strerror == "expected at most 100 bytes, received 40000000000"
    monkeypatch.setattr("allstep.common.files.disk.available_memory", lambda: 10**9)
    with pytest.raises(OSError) as error:
        read_regular(tmp_path / "file", maximum=10**12)
    assert error.value.strerror == "expected at most 1000000000 bytes, the memory that is left, received 40000000000"


def test_a_file_without_a_size_is_read_no_further():
    """Files of /proc have a size of 0 bytes."""
    with pytest.raises(OSError, match="expected at most 10 bytes, received 11"):
        read_regular("/proc/self/maps", maximum=10)


def test_memory_that_is_left_in_a_container(tmp_path):
    """Oracle: the kernel's description of control groups. The limit of a group holds for its descendants."""
    inner = tmp_path / "pod" / "job"
    inner.mkdir(parents=True)
    for directory, maximum, used, cache in ((inner, "max", 5, 0), (inner.parent, "1000", 700, 100)):
        (directory / "memory.max").write_text(f"{maximum}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    assert list(left_in_control_groups(tmp_path, "pod/job")) == [400]
    assert list(left_in_control_groups(tmp_path, "")) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(JSON)
def test_what_json_can_hold_comes_back(value):
    assert strict_json.loads(json.dumps(value).encode()) == value


def test_nesting():
    deepest = b"[" * strict_json.MAX_DEPTH + b"]" * strict_json.MAX_DEPTH
    assert strict_json.loads(b'{"[[\\"{": 1}') == {'[["{': 1}
    strict_json.loads(deepest)
    for data in (b"[%s]" % deepest, b"[" * 10**6, b'{"a":' * 10**5, b"]", b"[}"):
        with pytest.raises(strict_json.NotJson):
            strict_json.loads(data)
