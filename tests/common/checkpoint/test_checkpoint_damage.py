"""Damaged, forged and newer checkpoints: the previous one is loaded, or one line names the file and its fault."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_states import (
    ALL_FILES,
    DATA_FILES,
    assert_same,
    forge,
    forge_file,
    names,
    one_line,
    refuse_warning,
    save,
    state_of,
)
from hostile_files import a_socket, endless
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import CorruptCheckpoint, files, load, manifest
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.files.strict_json import Mismatch, NotJson


def flip(path: Path, position: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= mask
    path.write_bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def forged_manifests(draw) -> bytes:
    """Draw a real manifest in which some fields have any value, with a right checksum."""
    real = Manifest(
        sequence=1,
        created="2026-11-22T00:00:00+00:00",
        metric=0.5,
        framework="pytorch",
        progress=state_of(1).progress,
        rng={},
        schedule={},
        config={},
        versions={},
        files={name: manifest.FileRecord(1, "0" * 64) for name in DATA_FILES},
    )
    content = json.loads(manifest.encode(real)) | draw(
        st.dictionaries(st.sampled_from([item.name for item in fields(Manifest)]), JSON, max_size=2)
    )
    del content["checksum"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}).encode()


FORGED = forged_manifests()
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "BOOL", "BF16", "C64", "U8"]) | JSON,
        "shape": st.lists(st.integers(0, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 70), min_size=2, max_size=2) | JSON,
    },
)
HEADER = st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3).map(lambda value: json.dumps(value).encode())


def test_any_changed_byte_is_noticed(tmp_path_factory):
    """Whichever byte of the newest checkpoint is changed, load returns either the same state (for blanks of the
    manifest) or the previous one with a warning that names the file; loading it by its path raises an error."""
    directory = save(tmp_path_factory.mktemp("run"), 1, 2)
    newest = directory / "step-00000002"

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(ALL_FILES), st.integers(0, 5000), st.integers(1, 255))
    def check(name, position, mask):
        original = (newest / name).read_bytes()
        flip(newest / name, position, mask)
        warnings = []
        try:
            restored = load("latest", directory, warn=warnings.append)
            assert_same(restored, state_of(1 if warnings else 2))
            if warnings:
                assert name in warnings[0]
                with pytest.raises(CorruptCheckpoint, match=name):
                    load(newest, directory, warn=refuse_warning)
        except manifest.NewerFormat:
            # The changed byte is the digit of the format version, and a later format is not judged.
            assert json.loads((newest / name).read_text())["format_version"] > manifest.FORMAT_VERSION
        finally:
            (newest / name).write_bytes(original)

    check()


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "directory"])
def test_incomplete_newest_falls_back(tmp_path, name, damage):
    directory = save(tmp_path, 1, 2)
    path = directory / "step-00000002" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(data[: len(data) // 2 if damage == "half" else 0])
    warnings = []
    assert_same(load("latest", directory, warn=warnings.append), state_of(1))
    assert len(warnings) == 1 and name in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(CorruptCheckpoint, match=name) as error:
        load(directory / "step-00000002", directory, warn=refuse_warning)
    one_line(error)
    assert "; name another one, or the directory above" in str(error.value)
    assert_same(load(directory, directory, warn=warnings.append), state_of(1))


def test_a_newest_that_contradicts_itself_falls_back(tmp_path):
    directory, warnings = save(tmp_path, 1, 2), []

    def check(manifest):
        if manifest.progress.step == 2:
            raise Mismatch("expected something else")

    assert_same(load("latest", directory, warn=warnings.append, check=check), state_of(1))
    [line] = warnings
    assert re.search("step-00000002/manifest.json is damaged: expected something else; falling back", line)
    with pytest.raises(CorruptCheckpoint, match="expected something else; name another one, or the directory above"):
        load(directory / "step-00000002", directory, warn=refuse_warning, check=check)


def test_damaged_best_falls_back_to_the_next_best(tmp_path):
    directory = save(tmp_path, 1, 2, 3, metrics={1: 0.5, 2: 0.6})
    flip(directory / "step-00000002" / "model.safetensors", -1)
    warnings = []
    assert load("best", directory, warn=warnings.append).progress.step == 1
    assert len(warnings) == 1


def test_all_damaged(tmp_path):
    directory = save(tmp_path, 1, 2)
    flip(directory / "step-00000001" / "model.safetensors", -1)
    flip(directory / "step-00000002" / "manifest.json", 100)
    warnings = []
    expected = "undamaged .* only damaged ones .*step-00000002/manifest.json is damaged: .*; .*train from the start"
    with pytest.raises(UserError, match=expected) as error:
        load("latest", directory, warn=warnings.append)
    one_line(error)
    assert len(warnings) == 2


def test_damaged_ones_do_not_stop_a_run_nor_vanish(tmp_path):
    directory = save(tmp_path, 1, 2)
    (directory / "step-00000002" / "manifest.json").write_text("{")
    save(tmp_path, 3, 4, keep=1)
    assert names(directory) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("which", ["latest", "best", "{dir}", "{dir}/step-00000002"])
def test_newer_format(tmp_path, which):
    directory = save(tmp_path, 1, 2, metrics={1: 0.5})
    path = directory / "step-00000002" / "manifest.json"
    newer = manifest.FORMAT_VERSION + 1
    path.write_text(re.sub(r'"format_version": \d+', f'"format_version": {newer}', path.read_text()))
    with pytest.raises(UserError, match=f"has format {newer}, this allstep reads up to {newer - 1}") as error:
        load(which.format(dir=directory), directory, warn=refuse_warning)
    one_line(error)
    assert not isinstance(error.value, CorruptCheckpoint)


PROGRESS = {"epoch": 0, "offset": 0, "step": 0, "samples_seen": 0, "running": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../etc/passwd": {"size": 1, "sha256": ""}}},
        {"files": {name: None for name in DATA_FILES}},
        {"files": {name: {"size": "8", "sha256": 1} for name in DATA_FILES}},
        {"progress": {"epoch": 0}},
        {"progress": {"epoch": -1, "offset": 0, "step": 0, "samples_seen": 0, "running": {}}},
        {"progress": {"epoch": 0, "offset": "0", "step": 0, "samples_seen": 0, "running": {}}},
        {"progress": {"epoch": 0, "offset": 0, "step": 0, "samples_seen": 0, "running": 1}},
        {"metric": "0.9"},
        {"metric": 10**400},
        {"metric": {"non_finite": "high"}},
        {"rng": {"non_finite": []}, "sequence": None},
        {"sequence": "3"},
        {"sequence": True},
        {"sequence": 10**30},
        {"surprise": 1},
        {"created": "yesterday"},
        {"created": 20261122},
        {"framework": "jax"},
        {"framework": None},
        {"metric": True},
        {"metric": 1},
        {"progress": None},
        {"progress": {**PROGRESS, "epoch": True}},
        {"progress": {**PROGRESS, "step": 2.0}},
        {"progress": {**PROGRESS, "offset": 10**30}},
        {"progress": {**PROGRESS, "samples_seen": None}},
        {"progress": {**PROGRESS, "more": 1}},
        {"progress": {**PROGRESS, "running": {"loss_sum": "1"}}},
        {"progress": {**PROGRESS, "running": {"loss_sum": False}}},
        {"rng": []},
        {"schedule": "constant"},
        {"config": None},
        {"versions": {"torch": 2}},
        {"files": {}},
        {"files": {name: {"size": True, "sha256": "0" * 64} for name in DATA_FILES}},
        {"files": {name: {"size": -1, "sha256": "0" * 64} for name in DATA_FILES}},
        {"files": {name: {"size": 1, "sha256": "0" * 63 + "g"} for name in DATA_FILES}},
        {"format_version": 0},
        {"format_version": True},
        {"format_version": "1"},
        {"rng": {"a" * 30: [[[[[[]]]]]] * 1000}, "config": {"\n" * 10**5: {"\x1b[2J": []}}, "versions": []},
    ],
)
def test_forged_manifest(tmp_path, changes):
    directory = save(tmp_path, 1, 2)
    forge(directory / "step-00000002", **changes)
    with pytest.raises(CorruptCheckpoint, match="manifest.json is damaged: expected .* received ") as error:
        load(directory / "step-00000002", directory, warn=refuse_warning)
    assert len(one_line(error)) < 800


TEXTS = ["", "null", "[]", "1", "\0", "[" * 10**6, '{"a":' * 10**5, "[" * 40 + "]" * 40, "1" * 10**4, "[NaN]", "{}}"]
TEXTS += ['{"format_version": 1, "format_version": 2}', '{"format_version": Infinity}', "\ud800", '"']


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_manifest_that_is_none(tmp_path, text):
    directory = save(tmp_path, 1)
    (directory / "step-00000001" / "manifest.json").write_text(text, errors="surrogatepass")
    with pytest.raises(CorruptCheckpoint, match="manifest.json") as error:
        load(directory / "step-00000001", directory, warn=refuse_warning)
    one_line(error)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_checkpoint_that_this_user_may_not_read_is_no_damaged_one(name, tmp_path, monkeypatch):
    """An older one in its place would silently discard training. Root may read any, so the refusal is made up."""
    directory = save(tmp_path, 1, 2)

    def forbid(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == directory / "step-00000002" / name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path, *arguments, **options)

    reader = {"manifest.json": "read_regular", "model.safetensors": "open"}[name]
    read = getattr(files, reader, open)
    monkeypatch.setattr(files, reader, forbid, raising=False)
    with pytest.raises(UserError, match=f"step-00000002/{name} cannot be read: Permission denied"):
        load("latest", directory, warn=refuse_warning)


def test_manifest_too_large_to_be_one(tmp_path):
    directory = save(tmp_path, 1)
    os.truncate(directory / "step-00000001" / "manifest.json", 2**40)  # sparse
    with pytest.raises(CorruptCheckpoint, match="expected at most 67108864 bytes, received 1099511627776"):
        load(directory / "step-00000001", directory, warn=refuse_warning)


def test_file_of_another_size_is_not_even_read(tmp_path):
    directory = save(tmp_path, 1)
    os.truncate(directory / "step-00000001" / "model.safetensors", 2**40)  # sparse, and more than memory
    with pytest.raises(CorruptCheckpoint, match="model.safetensors is damaged: expected .* bytes, received"):
        load(directory / "step-00000001", directory, warn=refuse_warning)


HEADERS = [b"", b"{", b"{}", b"[]", b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}']
HEADERS += [b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32"}}']
HEADERS += [b'{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,4]}}', b'{"a":%s}' % (b"[" * 10**5)]
HEADERS += [b'{"a":{"dtype":"F32","shape":[0,%d,%d],"data_offsets":[0,0]}}' % (2**40, 2**40)]
HEADERS += [b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b'{"a":7}', b'{"a":{"dtype":7}}']
HEADERS += [b'{"%s":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' % name for name in (b"a" * 1001, b"\\n")]
HEADERS += [b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"I32"}}', b"\xff" * 40]
HEADERS += [b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % b",".join([b"1"] * 33)]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_forged_safetensors(tmp_path, header):
    """Wrong content with right checksums is still reported in one clear line."""
    directory = save(tmp_path, 1)
    forge_file(directory / "step-00000001", "model.safetensors", len(header).to_bytes(8, "little") + header + b"abcd")
    with pytest.raises(CorruptCheckpoint, match="model.safetensors") as error:
        load(directory / "step-00000001", directory, warn=refuse_warning)
    assert len(one_line(error)) < 800


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_the_checkpoints_fault(tmp_path, value):
    """Such numbers are never saved, so the file is damaged, and the loader falls back as from any other damage."""
    directory = save(tmp_path, 1, 2)
    weights = np.full((3, 4), value, np.float32)
    forge_file(directory / "step-00000002", "model.safetensors", safetensors.numpy.save({"dense.weight": weights}))
    with pytest.raises(CorruptCheckpoint, match="model.safetensors .* expected finite .* nan or inf in 'dense.weight'"):
        load(directory / "step-00000002", directory, warn=refuse_warning)
    warnings = []
    assert load("latest", directory, warn=warnings.append).progress.step == 1
    assert len(warnings) == 1


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("kind", [os.mkfifo, a_socket, endless])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, name, kind):
    directory = save(tmp_path, 1)
    (directory / "step-00000001" / name).unlink()
    kind(directory / "step-00000001" / name)
    with pytest.raises(CorruptCheckpoint, match=f"{name} .* expected a regular file, received a ") as error:
        load(directory / "step-00000001", directory, warn=refuse_warning)
    one_line(error)


def test_arrays_larger_than_memory_are_not_read(tmp_path):
    """The file is sparse, and the manifest states its size."""
    directory = save(tmp_path, 1) / "step-00000001"
    os.truncate(directory / "model.safetensors", 2**43)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    files["model.safetensors"]["size"] = 2**43
    forge(directory, files=files)
    with pytest.raises(CorruptCheckpoint, match="expected at most .*, the memory that is left, received"):
        load(directory, directory, warn=refuse_warning)


def test_an_output_directory_is_not_locked_by_somebody_elses_file(tmp_path):
    (tmp_path / "precious").write_text("content")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "precious")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / ".lock")
    for name in ("linked", "fifo"):
        with pytest.raises(UserError, match="expected an output directory that can be written, .*/.lock: ") as error:
            save(tmp_path / name, 1)
        one_line(error)
    assert (tmp_path / "precious").read_text() == "content"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=300) | FORGED)
def test_any_bytes_are_a_manifest_or_a_line(data):
    with contextlib.suppress(NotJson, Mismatch, manifest.NewerFormat):
        manifest.decode(data)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(header=st.binary(max_size=200) | HEADER, arrays=st.binary(max_size=64))
def test_any_bytes_are_arrays_or_a_line(tmp_path_factory, header, arrays):
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    data = len(header).to_bytes(8, "little") + header + arrays
    path.write_bytes(data)
    record = manifest.FileRecord(len(data), hashlib.sha256(data).hexdigest())
    with contextlib.suppress(CorruptCheckpoint):
        read = files._read_arrays(path, record)
        assert sum(array.nbytes for array in read.values()) == len(arrays)
