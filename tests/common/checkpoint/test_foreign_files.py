"""Files of the user in the output directory survive every way in which allstep removes or replaces files of its own."""

from __future__ import annotations

import os
import shutil

import pytest
from checkpoint_states import names, refuse_warning, save

from allstep.common.api import checkpoint
from allstep.common.base.errors import UserError
from allstep.common.checkpoint import OutputDirectory, load


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_other_names_stay(tmp_path):
    directory = save(tmp_path, 1)
    for name in (".tmp-precious", ".old-precious", ".old-step-x", ".tmp-step-1.bak", "step-9", "notes"):
        (directory / name).mkdir()
        (directory / name / "model.safetensors").write_text("mine")
    (directory / ".tmp-file").write_text("mine")
    before = contents(directory)
    save(tmp_path, 1, 2, 3, 4, 5)
    after = contents(directory)
    assert {path: after[path] for path in before if "step-00000001" not in str(path)}.items() <= before.items()


@pytest.mark.parametrize("name", [".tmp-step-00000003", ".old-step-00000001", ".old-step-00000003"])
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_needed_name_that_is_taken_is_refused(name, kind, tmp_path):
    directory, elsewhere = save(tmp_path / "run", 1), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("mine")
    if kind == "link":
        (directory / name).symlink_to(elsewhere)
    elif kind == "file":
        (directory / name).write_text("mine")
    else:
        elsewhere.rename(directory / name)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"{name} holds \S+, which allstep did not write; move it elsewhere"):
        save(tmp_path / "run", 2)
    assert contents(tmp_path) == before


def test_files_in_a_checkpoint_keep_their_path(tmp_path):
    """The folder is replaced (step 2 again), expires (steps 3 to 6), or was replaced when the run was killed."""
    directory = save(tmp_path, 2)
    (directory / "step-00000002" / "notes.txt").write_text("mine")
    save(tmp_path, 2)
    shutil.copytree(directory / "step-00000002", directory / ".old-step-00000002")
    (directory / "step-00000002" / "notes.txt").unlink()
    save(tmp_path, 3, 4, 5, 6)
    assert (directory / "step-00000002" / "notes.txt").read_text() == "mine"
    assert names(directory) == [f"step-{step:08}" for step in (2, 4, 5, 6)]
    load(directory / "step-00000002", directory, warn=refuse_warning)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "FIFO", "loop"])
def test_something_else_in_the_place_of_a_file_is_kept_beside(name, kind, tmp_path):
    directory = save(tmp_path, 1, 2)
    path = directory / "step-00000002" / name
    path.unlink()
    {"folder": path.mkdir, "FIFO": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[kind]()
    save(tmp_path, 2)
    load(directory / "step-00000002", directory, warn=refuse_warning)
    assert os.path.lexists(directory / "step-00000002.damaged-1" / name)


def test_no_link_is_followed(tmp_path):
    other = save(tmp_path / "other", 1, 2, 3)
    before = contents(other)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(other)
    with pytest.raises(UserError, match="checkpoints is a link to .*; remove the link, or link the whole --output-dir"):
        save(tmp_path / "run", 4, keep=1)
    assert contents(other) == before
    directory = save(tmp_path / "second", 9)
    (directory / "step-00000001").symlink_to(other / "step-00000001")
    save(tmp_path / "second", 10, 11, 12)
    with pytest.raises(UserError, match="could not be saved: its name belongs to step-00000001, which allstep did not"):
        save(tmp_path / "second", 1)
    assert contents(other) == before and (directory / "step-00000001").is_symlink()
    (tmp_path / "linked").symlink_to(tmp_path / "second")
    save(tmp_path / "linked", 13)


def test_a_lock_file_of_the_user_stays(tmp_path):
    (tmp_path / "precious").write_text("pid 1 on host a\n")
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / ".lock"
    for put in (lambda: os.link(tmp_path / "precious", lock), lambda: lock.write_text("mine")):
        put()
        before = contents(tmp_path)
        with pytest.raises(UserError, match=r"\.lock is a file that allstep did not write; move it"):
            OutputDirectory(tmp_path / "run", warn=refuse_warning)
        assert contents(tmp_path) == before
        lock.unlink()
    for content in ("", "\0" * 20, "pid 17 on host a-b.c\n"):
        lock.write_text(content)
        OutputDirectory(tmp_path / "run", warn=refuse_warning).close()
    assert lock.read_text().startswith(f"pid {os.getpid()} on host ")


def test_a_protected_checkpoint_keeps_its_name_or_gets_another(tmp_path, monkeypatch):
    """It expires (steps 3 to 6), and is then reached again; permission bits say nothing to root, so access is asked."""
    directory = save(tmp_path, 2)
    is_allowed, path = os.access, directory / "step-00000002"
    protected = path.stat().st_ino
    monkeypatch.setattr(os, "access", lambda at, mode: os.stat(at).st_ino != protected and is_allowed(at, mode))
    before = contents(path)
    save(tmp_path, 3, 4, 5, 6)
    assert names(directory) == [f"step-{step:08}" for step in (2, 4, 5, 6)] and contents(path) == before
    save(tmp_path, 2)
    assert names(directory) == ["step-00000002", "step-00000002.protected-1", "step-00000005", "step-00000006"]
    assert contents(directory / "step-00000002.protected-1") == before
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / "loop", step, {"a": 1}, keep=1)
        protected = (tmp_path / "loop" / "step-00000001").stat().st_ino
    assert names(tmp_path / "loop") == ["step-00000001", "step-00000003"]


def test_a_protected_folder_of_checkpoints_is_refused_before_training(tmp_path, monkeypatch):
    directory = save(tmp_path, 2)
    monkeypatch.setattr(os, "access", lambda at, mode: at != directory)
    with pytest.raises(UserError, match="^checkpoints directory .* cannot be written: it is protected from writing$"):
        save(tmp_path, 3)


def test_a_loop_leaves_files_of_the_user(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": 1})
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    checkpoint.save(tmp_path, 3, {"a": 3}, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    before = contents(tmp_path)
    with pytest.raises(OSError, match="holds 'notes.txt', which allstep did not write"):
        checkpoint.save(tmp_path, 1, {"a": 4})
    assert {**contents(tmp_path)}.items() >= before.items()


def test_a_step_that_its_folder_contradicts_is_damage(tmp_path):
    directory = save(tmp_path, 3)
    (directory / "step-00000003").rename(directory / "step-00000045")
    cause = r"manifest.json is damaged: expected progress.step, as the folder's name has it, to be 45, received 3"
    for which in ("latest", directory / "step-00000045"):
        with pytest.raises(UserError, match=cause):
            load(which, directory, warn=lambda _: None)
