"""Edits: the oracle is the text of a small file before and after."""

from __future__ import annotations

import pytest
from horovod_edits import EDITS, Edit, EditFailed, apply_edits


def edit(old: str, new: str = "new", *, path: str = "src/a.cc", count: int = 1) -> Edit:
    return Edit(path=path, old=old, new=new, count=count, reason="because")


@pytest.fixture
def source(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cc").write_text("one two two\n")
    return tmp_path


def test_edits_apply_in_order(source):
    apply_edits(source, [edit("one", "three"), edit("three two", "3")])
    assert (source / "src" / "a.cc").read_text() == "3 two\n"


def test_text_that_is_not_there_is_an_error_that_says_where_and_why(source):
    with pytest.raises(EditFailed, match=r"src/a\.cc: expected 1 times, found 0 times: 'four' \(because\)"):
        apply_edits(source, [edit("four")])


def test_text_found_more_often_than_expected_is_an_error(source):
    with pytest.raises(EditFailed, match="found 2 times"):
        apply_edits(source, [edit("two")])
    apply_edits(source, [edit("two", "2", count=2)])
    assert (source / "src" / "a.cc").read_text() == "one 2 2\n"


def test_a_file_that_is_not_there_is_an_error(source):
    with pytest.raises(EditFailed, match="no such file"):
        apply_edits(source, [edit("one", path="src/b.cc")])


def test_applying_the_same_edit_twice_is_an_error(source):
    apply_edits(source, [edit("one")])
    with pytest.raises(EditFailed):
        apply_edits(source, [edit("one")])


def test_every_edit_says_why_and_changes_something():
    for e in EDITS:
        assert e.reason
        assert e.old != e.new
