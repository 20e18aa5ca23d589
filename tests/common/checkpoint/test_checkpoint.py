"""Checkpoints are restored bit for bit, and the right ones are kept. Damage: test_checkpoint_damage.py. Kills, full
disks and locks: test_checkpoint_kills.py."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_states import ALL_FILES, assert_same, names, one_line, refuse_warning, save, state_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import Checkpoints, OutputDirectory, TrainState, check_compatible, load, writer

# Saving and loading


def load_written(checkpoints: Checkpoints) -> TrainState:
    checkpoints.wait()
    return load("latest", checkpoints.directory, warn=refuse_warning)


def test_state_comes_back_whole(tmp_path):
    directory = save(tmp_path, 7)
    assert names(directory) == ["step-00000007"]
    assert names(directory / "step-00000007") == sorted(ALL_FILES)
    assert_same(load("latest", directory, warn=refuse_warning), state_of(7))


def test_a_run_may_wait_for_a_rank_that_still_saves(tmp_path):
    saving = OutputDirectory(tmp_path, warn=refuse_warning)
    with pytest.raises(UserError, match="in use by"):
        OutputDirectory(tmp_path, warn=refuse_warning, max_wait=0.1)
    threading.Timer(0.3, saving.close).start()
    OutputDirectory(tmp_path, warn=refuse_warning, max_wait=60).close()


def test_a_child_that_is_being_started_does_not_hold_the_lock(tmp_path):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        descriptors = [output._descriptor]  # which a child has until its exec
        child = subprocess.Popen(["sleep", "60"], pass_fds=descriptors)
    try:
        OutputDirectory(tmp_path, warn=refuse_warning).close()
    finally:
        child.kill()
        child.wait()


dtypes = st.sampled_from(["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
# Values that are not finite are refused.
floats = {"allow_nan": False, "allow_infinity": False}


def arrays_of(dtype: str) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, shapes, elements=floats if dtype.startswith("float") else None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=dtypes.flatmap(arrays_of), direct=st.booleans())
def test_every_array_comes_back_bit_for_bit(tmp_path, monkeypatch, array, direct):
    # Transposed and strided views stand for the other framework's layouts; the sign of 0 counts as a bit.
    arrays = {"model/a": array, "model/b": array.T, "optimizer/a": np.tile(array, 2)[..., ::2]}
    monkeypatch.setattr(writer, "available_memory", lambda: 0 if direct else 2**30)
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        checkpoints.save(state_of(1, arrays))
        assert_same(load_written(checkpoints), state_of(1, arrays))
        checkpoints.close()


def test_arrays_come_back_writable(tmp_path):
    array = load("latest", save(tmp_path, 1), warn=refuse_warning).arrays["model/dense.weight"]
    array += 1  # raises if it is read-only


def test_caller_may_change_everything_at_once(tmp_path):
    """Oracle: the state at the time of the call. The write is slow enough to be overtaken, and large enough for two
    threads to copy it."""
    arrays = {f"model/{i}": np.full((1000, 1000), i, np.float32) for i in range(10)}
    assert sum(array.nbytes for array in arrays.values()) > writer.SHARED_BYTES
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        state = state_of(1, arrays)
        checkpoints.save(state)
        for array in arrays.values():
            array[:] = -1
        state.rng["state"] = state.progress.running["loss_sum"] = state.config["model"] = 0
        restored = load_written(checkpoints)
        checkpoints.close()
    assert_same(restored, state_of(1, {f"model/{i}": np.full((1000, 1000), i, np.float32) for i in range(10)}))


def test_reserved_memory_does_not_leak_into_a_state(tmp_path):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        checkpoints.reserve({**state_of(1).arrays, "model/gone": np.ones(3)})
        checkpoints.save(state_of(2))
        assert_same(load_written(checkpoints), state_of(2))
        checkpoints.close()


def test_bfloat16_is_refused_by_name(tmp_path):
    """NumPy has no bfloat16: safetensors writes it and then cannot read it back (KeyError: 'BF16')."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        with pytest.raises(UserError) as error:
            checkpoints.save(state_of(1, {"model/a": np.zeros(2, bfloat16)}))
        checkpoints.close()
    assert "model/a" in one_line(error) and "bfloat16" in one_line(error)


@pytest.mark.parametrize("config", [{1: "a"}, {"a": np.float32(1)}, {"a": {1, 2}}])
def test_what_json_cannot_hold_is_refused_at_once(tmp_path, config):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
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
    """Surviving a power cut, which no test can make, needs this order: files and directory are synced before the
    rename, and the rename before save is done. Oracle: the order of the calls, which are really made."""
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
    json.loads(text, parse_constant=refuse_warning)  # called for NaN and Infinity, which JSON does not have


# Retention and selection


def test_last_ones_and_the_best_stay(tmp_path):
    directory = save(tmp_path, *range(1, 8), keep=2, metrics={1: math.nan, 2: 0.9, 4: 0.8, 7: 0.9})
    # The first of equals is best; NaN is never best.
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
    """Oracle: directories as a kill leaves them, made manually from whole checkpoints."""
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


# Values that are refused


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model/dense.weight", "optimizer/dense.weight/momentum"])
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_not_finite_never_becomes_a_checkpoint(tmp_path, monkeypatch, name, value, direct):
    monkeypatch.setattr(writer, "available_memory", lambda: 0 if direct else 2**30)
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output, keep=1)
        checkpoints.save(state_of(1))
        broken = state_of(2)
        broken.arrays[name].flat[-1] = value
        with pytest.raises(UserError, match=f"finite.* in {name}") as error:
            checkpoints.save(broken)
            checkpoints.close()
        one_line(error)
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
    assert_same(load("latest", tmp_path / "checkpoints", warn=refuse_warning), state_of(1))


def test_a_failed_write_is_told_at_once_and_ends_the_run_at_the_next_save_or_at_close(tmp_path):
    warnings = queue.Queue()
    with OutputDirectory(tmp_path, warn=warnings.put) as output:
        checkpoints = Checkpoints(output)
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(state_of(1))
        assert "step-00000001 (0.0 MB) could not be saved: " in (warning := warnings.get(timeout=60))
        assert warning.endswith(": fix that; it is tried again until the next save")
        with pytest.raises(UserError, match="could not be saved.*; fix that, then start again") as error:
            checkpoints.save(state_of(2))
        one_line(error)
        (tmp_path / "checkpoints").mkdir()
        checkpoints.save(state_of(3))
        checkpoints.wait()
        (tmp_path / "checkpoints" / ".tmp-step-00000004").touch()
        checkpoints.save(state_of(4))
        with pytest.raises(
            UserError, match="step-00000004.*; the checkpoints before it are unharmed: fix that, then --r"
        ):
            checkpoints.close()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failed_write_is_tried_again(awaited, tmp_path):
    """Nothing is lost if there is room again, at once or when the run saves next."""
    warnings = queue.Queue()
    with OutputDirectory(tmp_path, warn=warnings.put) as output:
        checkpoints = Checkpoints(output)
        (tmp_path / "checkpoints").rename(tmp_path / "away")
        checkpoints.save(state_of(1))
        warnings.get(timeout=60)
        (tmp_path / "away").rename(tmp_path / "checkpoints")
        if not awaited:
            assert warnings.get(timeout=60) == "the checkpoint of step 1 is saved now"
        checkpoints.save(state_of(2))
        checkpoints.close()
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000002"]


def test_a_run_whose_folder_another_run_has_taken_leaves_its_checkpoints_alone(tmp_path):
    with OutputDirectory(tmp_path / "run", warn=refuse_warning) as old:
        replaced = Checkpoints(old, keep=1)
        replaced.save(state_of(8))
        replaced.wait()
        shutil.rmtree(tmp_path / "run")
        directory = save(tmp_path / "run", 1, 2)
        replaced.save(state_of(9))
        with pytest.raises(
            UserError, match="output directory .*run was removed or renamed while .* belongs to another run"
        ) as error:
            replaced.close()
        one_line(error)
    assert names(directory) == ["step-00000001", "step-00000002"]
    assert_same(load("latest", directory, warn=refuse_warning), state_of(2))


@pytest.mark.parametrize("name", ["a\nb", "x" * 1001, "\x1b[2J"])
def test_names_that_no_reader_accepts_are_refused_before_the_first_step(name, tmp_path):
    with OutputDirectory(tmp_path, warn=refuse_warning) as output:
        checkpoints = Checkpoints(output)
        with pytest.raises(UserError, match="a checkpoint cannot hold a weight named 'model/") as error:
            checkpoints.reserve({f"model/{name}": np.zeros(3, np.float32)})
        one_line(error)
        checkpoints.close()


# A checkpoint of another model


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("model/b", np.zeros(4, np.float32), r"expected model/b \(5,\), received \(4,\)"),
        ("model/c", np.zeros(5, np.float32), r"expected model/b \(5,\), received none"),
        (
            "model/module.b",
            np.zeros(5, np.float32),
            "expected model/b .* received none; rename 'model/module.b' and the like",
        ),
        ("model/b", np.zeros(5, np.int64), "expected model/b in float32, as trainers write it, received int64"),
        ("model/b", np.zeros(5, bool), "expected model/b in float32, as trainers write it, received bool"),
        ("model/b", np.zeros(5), "expected model/b in float32, as trainers write it, received float64"),
        ("model/b", np.zeros(5, ">f4"), "expected model/b in float32, as trainers write it, received >f4"),
        ("optimizer/x\n", np.zeros(5, np.float32), r"expected no 'optimizer/x\\n', received one of shape \(5,\)"),
        ("optimizer/b/exp_avg_sq", np.full(5, -1, np.float32), "expected optimizer/b/exp_avg_sq .* 0 or more.* -1"),
        ("model/bn.running_var", np.full(5, -1, np.float32), "expected model/bn.running_var .* 0 or more.* -1"),
    ],
)
def test_first_mismatch_is_named(name, array, message):
    expected = {"model/a": (2, 3), "model/b": (5,), "optimizer/b/exp_avg_sq": (5,), "model/bn.running_var": (5,)}
    arrays = {known: np.zeros(shape, np.float32) for known, shape in expected.items()}
    if name in ("model/c", "model/module.b"):
        del arrays["model/b"]
    with pytest.raises(UserError, match=message) as error:
        check_compatible(expected, arrays | {name: array})
    one_line(error)


def test_no_mismatch():
    arrays = {"model/b": np.array(1, np.float32), "model/a": np.zeros((2, 3), np.float32)}
    check_compatible({"model/a": (2, 3), "model/b": ()}, arrays)
