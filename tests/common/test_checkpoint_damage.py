"""Damaged, forged and newer checkpoints: the one before is loaded, or one line says what is wrong with which file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from checkpoint_states import ALL_FILES, DATA_FILES, assert_same, names, one_line, refuse_warning, save, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.checkpoint import CorruptCheckpoint, load, manifest
from allstep.common.errors import UserError


def flip(path: Path, position: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= mask
    path.write_bytes(data)


def forge(checkpoint: Path, **changes: object) -> None:
    """Changes the manifest and makes its checksum right again, as an attacker can."""
    content = json.loads((checkpoint / "manifest.json").read_text()) | changes
    del content["checksum"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(content))


def test_any_changed_byte_is_noticed(tmp_path_factory):
    """Property: whatever byte of the newest is changed, what loads is either its very state (blanks of the
    manifest) or the one before it, with a warning that names the file; by its path it is an error."""
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
            # The digit of the format version itself: a later format is not ours to judge.
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
    with pytest.raises(UserError, match="undamaged") as error:
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
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="has format 2, this allstep reads up to 1") as error:
        load(which.format(dir=directory), directory, warn=refuse_warning)
    one_line(error)
    assert not isinstance(error.value, CorruptCheckpoint)


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
        {"surprise": 1},
    ],
)
def test_forged_manifest(tmp_path, changes):
    directory = save(tmp_path, 1, 2)
    forge(directory / "step-00000002", **changes)
    with pytest.raises(CorruptCheckpoint) as error:
        load(directory / "step-00000002", directory, warn=refuse_warning)
    one_line(error)


@pytest.mark.parametrize("text", ["", "null", "[]", "1", "\0", "[" * 10**6, '{"a":' * 10**5, "1" * 10**4])
def test_manifest_that_is_none(tmp_path, text):
    directory = save(tmp_path, 1)
    (directory / "step-00000001" / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match="manifest.json") as error:
        load(directory / "step-00000001", directory, warn=refuse_warning)
    one_line(error)


def test_manifest_too_large_to_be_one(tmp_path):
    directory = save(tmp_path, 1)
    os.truncate(directory / "step-00000001" / "manifest.json", 2**40)  # sparse
    with pytest.raises(CorruptCheckpoint, match="larger than"):
        load(directory / "step-00000001", directory, warn=refuse_warning)


def test_file_of_another_size_is_not_even_read(tmp_path):
    directory = save(tmp_path, 1)
    os.truncate(directory / "step-00000001" / "model.safetensors", 2**40)  # sparse, and more than memory
    with pytest.raises(CorruptCheckpoint, match="model.safetensors is damaged: expected .* bytes, received"):
        load(directory / "step-00000001", directory, warn=refuse_warning)


HEADERS = [b"", b"{", b"{}", b"[]", b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}']
HEADERS += [b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32"}}']


@pytest.mark.parametrize("header", HEADERS)
def test_forged_safetensors(tmp_path, header):
    """Checksums right, content wrong: still one clear line."""
    directory = save(tmp_path, 1)
    data = len(header).to_bytes(8, "little") + header + b"abcd"
    (directory / "step-00000001" / "model.safetensors").write_bytes(data)
    files = json.loads((directory / "step-00000001" / "manifest.json").read_text())["files"]
    files["model.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(directory / "step-00000001", files=files)
    with pytest.raises(CorruptCheckpoint, match="model.safetensors") as error:
        load(directory / "step-00000001", directory, warn=refuse_warning)
    one_line(error)
