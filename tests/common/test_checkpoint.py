"""Checkpoints come back bit for bit, or not at all. Kills, full disks and locks: test_checkpoint_kills.py."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from allstep.common.checkpoint import (
    Checkpoints,
    CorruptCheckpoint,
    OutputDirectory,
    Progress,
    TrainState,
    check_compatible,
    load,
    manifest,
    writer,
)
from allstep.common.errors import UserError

DATA_FILES = ["model.safetensors", "optimizer.safetensors"]
ALL_FILES = [*DATA_FILES, "manifest.json"]


def state_of(step: int, arrays: dict[str, np.ndarray] | None = None) -> TrainState:
    """A state that follows from its step alone: the oracle for what was saved."""
    values = np.random.default_rng(step).standard_normal(12).astype(np.float32)
    return TrainState(
        framework="pytorch",
        arrays=arrays or {"model/dense.weight": values.reshape(3, 4), "optimizer/dense.weight/momentum": -values},
        progress=Progress(
            epoch=step // 10,
            offset=step % 10 * 64,
            step=step,
            samples_seen=step * 64,
            running={"loss_sum": step / 3, "best": -math.inf},
        ),
        rng={"bit_generator": "PCG64", "state": 2**127 + step},
        schedule={"base_lr": 0.1},
        config={"model": "mlp", "hidden": [16, 8], "clip": None},
        versions={"numpy": np.__version__},
    )


def assert_same(left: TrainState, right: TrainState) -> None:
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
        other = right.arrays[name]
        assert (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes()), name
    for part in ("framework", "progress", "rng", "schedule", "config", "versions"):
        assert getattr(left, part) == getattr(right, part), part


def refuse_warning(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def save(output: Path, *steps: int, keep: int = 3, metrics: dict[int, float] | None = None) -> Path:
    """Saves the states of `steps` and returns the checkpoints directory."""
    with OutputDirectory(output, warn=refuse_warning) as locked:
        checkpoints = Checkpoints(locked, keep=keep, warn=refuse_warning)
        for step in steps:
            checkpoints.save(state_of(step), metric=(metrics or {}).get(step))
        checkpoints.close()
    return output / "checkpoints"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


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


# What was saved comes back


def test_state_comes_back_whole(tmp_path):
    directory = save(tmp_path, 7)
    assert names(directory) == ["step-00000007"]
    assert names(directory / "step-00000007") == sorted(ALL_FILES)
    assert_same(load("latest", directory, warn=refuse_warning), state_of(7))


dtypes = st.sampled_from(["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shapes)), direct=st.booleans())
def test_every_array_comes_back_bit_for_bit(tmp_path, monkeypatch, array, direct):
    # Transposed and strided views stand for the other framework's layouts; NaN payloads count as bits.
    arrays = {"model/a": array, "model/b": array.T, "optimizer/a": np.tile(array, 2)[..., ::2]}
    monkeypatch.setattr(writer, "available_memory", lambda: 0 if direct else 2**30)
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        checkpoints.save(state_of(1, arrays))
        assert_same(checkpoints.load("latest"), state_of(1, arrays))
        checkpoints.close()


def test_arrays_come_back_writable(tmp_path):
    array = load("latest", save(tmp_path, 1), warn=refuse_warning).arrays["model/dense.weight"]
    array += 1  # raises if it is read-only


def test_caller_may_change_everything_at_once(tmp_path):
    """Oracle: the state as it was when save was called, over a write long enough to be overtaken."""
    arrays = {f"model/{i}": np.full((1000, 1000), i, np.float32) for i in range(10)}
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        state = state_of(1, arrays)
        checkpoints.save(state)
        for array in arrays.values():
            array[:] = -1
        state.rng["state"] = state.progress.running["loss_sum"] = state.config["model"] = 0
        restored = checkpoints.load("latest")
        checkpoints.close()
    assert_same(restored, state_of(1, {f"model/{i}": np.full((1000, 1000), i, np.float32) for i in range(10)}))


def test_reserved_memory_does_not_leak_into_a_state(tmp_path):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        checkpoints.reserve({**state_of(1).arrays, "model/gone": np.ones(3)})
        checkpoints.save(state_of(2))
        assert_same(checkpoints.load("latest"), state_of(2))
        checkpoints.close()


def test_bfloat16_is_refused_by_name(tmp_path):
    """NumPy has no bfloat16: safetensors writes it and then cannot read it back (KeyError: 'BF16')."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        with pytest.raises(UserError) as error:
            checkpoints.save(state_of(1, {"model/a": np.zeros(2, bfloat16)}))
        checkpoints.close()
    assert "model/a" in one_line(error) and "bfloat16" in one_line(error)


@pytest.mark.parametrize("config", [{1: "a"}, {"a": np.float32(1)}, {"a": {1, 2}}])
def test_what_json_cannot_hold_is_refused_at_once(tmp_path, config):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        with pytest.raises(TypeError):
            checkpoints.save(replace(state_of(1), config=config))
        checkpoints.close()
    assert names(tmp_path / "checkpoints") == []


def test_checkpoint_is_as_readable_as_the_umask_says(tmp_path):
    old = os.umask(0o027)
    try:
        directory = save(tmp_path, 1)
    finally:
        os.umask(old)
    for name in ALL_FILES:
        assert (directory / "step-00000001" / name).stat().st_mode & 0o777 == 0o640


def test_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    """What a power cut needs, which no test can make: files and directory are on the disk before the
    rename, and the rename is before save is done. Oracle: the order of the calls, which are really made."""
    calls = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda *paths: (calls.append("rename"), rename(*paths)))
    directory = save(tmp_path, 1)
    temporary = directory / ".tmp-step-00000001"
    synced = [str(path) for path in (*(temporary / name for name in ALL_FILES), temporary)]
    assert calls == [str(tmp_path), *synced, "rename", str(directory)]


def test_manifest_is_strict_json(tmp_path):
    text = (save(tmp_path, 1, metrics={1: math.nan}) / "step-00000001" / "manifest.json").read_text()
    json.loads(text, parse_constant=refuse_warning)  # called for NaN and Infinity, which JSON does not know


# Which ones stay, and which one is meant


def test_last_ones_and_the_best_stay(tmp_path):
    directory = save(tmp_path, *range(1, 8), keep=2, metrics={1: math.nan, 2: 0.9, 4: 0.8, 7: 0.9})
    # Of equals the first is best; NaN is never best.
    assert names(directory) == ["step-00000002", "step-00000006", "step-00000007"]
    assert load("best", directory, warn=refuse_warning).progress.step == 2
    assert load("latest", directory, warn=refuse_warning).progress.step == 7


def test_best_without_any_metric(tmp_path):
    with pytest.raises(UserError, match="validation accuracy") as error:
        load("best", save(tmp_path, 1, 2), warn=refuse_warning)
    one_line(error)


def test_latest_is_the_last_written_even_at_an_earlier_step(tmp_path):
    """A run resumed from an earlier checkpoint goes on from there, whatever the first attempt left."""
    save(tmp_path, 10, 20, 30)
    directory = save(tmp_path, 15)
    assert load("latest", directory, warn=refuse_warning).progress.step == 15
    assert names(directory) == ["step-00000015", "step-00000020", "step-00000030"]


def test_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").unlink()  # the reason to go back to 1
    directory = save(tmp_path, 2, metrics={2: 0.5})
    assert names(directory) == ["step-00000001", "step-00000002"]
    assert load("best", directory, warn=refuse_warning).progress.step == 2


def test_paths(tmp_path):
    directory = save(tmp_path, 1, 2)
    for path, step in [(directory / "step-00000001", 1), (directory, 2), (tmp_path, 2), (str(tmp_path), 2)]:
        assert load(path, "elsewhere", warn=refuse_warning).progress.step == step
    shutil.copytree(directory / "step-00000001", tmp_path / "exported")
    assert load(tmp_path / "exported", "elsewhere", warn=refuse_warning).progress.step == 1


@pytest.mark.parametrize("which", ["latest", "best", "{tmp}", "{tmp}/checkpoints", "{tmp}/nothing", "step-1"])
def test_nothing_there(tmp_path, which):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError) as error:
        load(which.format(tmp=tmp_path), tmp_path / "checkpoints", warn=refuse_warning)
    one_line(error)


def test_what_killed_runs_left_is_put_right(tmp_path):
    """Oracle: the directories as a kill leaves them, made by hand from whole checkpoints."""
    directory = save(tmp_path, 1, 2, 3)
    shutil.copytree(directory / "step-00000003", directory / ".old-step-00000003")
    (directory / ".old-step-00000003" / "manifest.json").unlink()  # its successor was already in place
    (directory / "step-00000002").rename(directory / ".old-step-00000002")  # its successor never came
    (directory / ".tmp-step-00000004").mkdir()
    (directory / ".tmp-step-00000004" / "model.safetensors").write_bytes(b"half")
    (directory / "notes").mkdir()
    assert load("latest", directory, warn=refuse_warning).progress.step == 3
    shutil.rmtree(directory / "step-00000003")
    shutil.rmtree(directory / ".old-step-00000003")
    assert load("latest", directory, warn=refuse_warning).progress.step == 2
    save(tmp_path)
    assert names(directory) == ["notes", "step-00000001", "step-00000002"]


def test_keep_below_one(tmp_path):
    with pytest.raises(UserError, match="received --keep-checkpoints 0"):
        save(tmp_path, keep=0)


# Damage


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


def test_failed_write_surfaces_at_the_next_save_and_at_close(tmp_path):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, warn=refuse_warning)
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(state_of(1))
        with pytest.raises(UserError, match="could not be saved") as error:
            checkpoints.save(state_of(2))
        one_line(error)
        checkpoints.save(state_of(3))
        with pytest.raises(UserError, match="step-00000003"):
            checkpoints.close()


# A checkpoint of another model


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"model/a": (2, 3), "model/b": (5,)}, r"expected model/b \(5,\), received \(4,\)"),
        ({"model/a": (2, 3), "model/c": (1,), "model/b": (5,)}, r"expected model/c \(1,\), received none"),
        ({"model/a": (2, 3)}, r"model/b \(4,\) was not expected"),
    ],
)
def test_first_mismatch_is_named(expected, message):
    with pytest.raises(UserError, match=message) as error:
        check_compatible(expected, {"model/a": np.zeros((2, 3)), "model/b": np.zeros(4)})
    one_line(error)


def test_no_mismatch():
    check_compatible({"model/a": (2, 3), "model/b": ()}, {"model/b": np.array(1), "model/a": np.zeros((2, 3))})
