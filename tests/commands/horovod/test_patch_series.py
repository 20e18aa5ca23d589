"""The patches. Oracles: small files before and after, and GNU patch on Horovod's source."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile

import pytest

from allstep.commands.horovod import build
from allstep.commands.horovod.patch_series import (
    GROUPS,
    PATCHES,
    PatchFailed,
    apply_patches,
    inserted,
    parse,
    series,
)

ONE_TO_THREE = """\
Subject

Why.

Upstream: not reported

--- a/src/a.cc
+++ b/src/a.cc
@@ -1,3 +1,3 @@
-one
+three
 two
 two
"""
A_LAST_LINE = (
    ONE_TO_THREE.partition("--- ")[0]
    + """\
--- a/src/a.cc
+++ b/src/a.cc
@@ -2,2 +2,3 @@
 two
 two
+last
"""
)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cc").write_text("one\ntwo\ntwo\n")
    return tmp_path


@pytest.fixture(scope="module")
def horovod(tmp_path_factory):
    """Return the folder of the published files of Horovod that patches change."""
    archive = build.cache_folder() / f"horovod-{build.VERSION}.tar.gz"
    if not archive.exists():
        pytest.skip("make setup has taken its wheel from a cache without the source")
    folder = tmp_path_factory.mktemp("published")
    paths = {f"horovod-{build.VERSION}/{hunk.path}" for patch in series() for hunk in patch.hunks}
    with tarfile.open(archive) as tar:
        tar.extractall(folder, members=[member for member in tar if member.name in paths])
    return folder / f"horovod-{build.VERSION}"


def text(source) -> str:
    return (source / "src" / "a.cc").read_text()


def test_patches_apply_in_order(source):
    apply_patches(source, [parse("1", ONE_TO_THREE), parse("2", A_LAST_LINE)])
    assert text(source) == "three\ntwo\ntwo\nlast\n"


def test_diff_s_own_lines_and_dates_are_understood(source):
    dated = ONE_TO_THREE.replace("a.cc\n", "a.cc\t2026-01-01 00:00:00.0 +0000\n")
    apply_patches(source, [parse("1", dated.replace("--- a", "diff -ur a/src/a.cc b/src/a.cc\n--- a"))])
    assert text(source) == "three\ntwo\ntwo\n"


def test_a_patch_that_does_not_fit_stops_with_its_name(source):
    (source / "src" / "a.cc").write_text("zero\none\ntwo\ntwo\n")  # one line further down
    with pytest.raises(
        PatchFailed, match=r"^0002-last: expected its lines in src/a\.cc from line 2 on, received others$"
    ):
        apply_patches(source, [parse("0002-last", A_LAST_LINE)])


def test_a_patch_that_is_in_the_source_already_does_not_fit(source):
    apply_patches(source, [parse("0001-three", ONE_TO_THREE)])
    with pytest.raises(PatchFailed, match="^0001-three: "):
        apply_patches(source, [parse("0001-three", ONE_TO_THREE)])


def test_a_file_that_is_not_there_stops_with_the_patch_s_name(source):
    with pytest.raises(PatchFailed, match=r"^0001-three: expected the file src/b\.cc"):
        apply_patches(source, [parse("0001-three", ONE_TO_THREE.replace("a.cc", "b.cc"))])


def test_a_removed_line_may_look_like_the_head_of_a_file(source):
    (source / "src" / "a.cc").write_text("-- a/one\ntwo\ntwo\n")
    apply_patches(source, [parse("1", ONE_TO_THREE.replace("-one", "--- a/one"))])
    assert text(source) == "three\ntwo\ntwo\n"


def test_the_place_of_a_text_is_filled_in(source):
    name, content = next(iter(inserted().items()))
    apply_patches(source, [parse("1", ONE_TO_THREE.replace("+three", "+{{" + name + "}}")), parse("2", A_LAST_LINE)])
    assert text(source) == f"{content}two\ntwo\nlast\n"


@pytest.mark.parametrize(
    "broken",
    [
        "Subject\n\nWhy.\n",
        ONE_TO_THREE.removesuffix(" two\n"),
        ONE_TO_THREE + "+four\n",
        ONE_TO_THREE.replace("--- a/src/a.cc", "--- /dev/null"),
        ONE_TO_THREE.replace("+++ b/src/a.cc", "+++ b/src/b.cc"),
        ONE_TO_THREE.partition("@@")[0] + "@@ -1,0 +2,1 @@\n+four\n",
    ],
    ids=["none", "too-few-lines", "too-many-lines", "new-file", "another-file", "no-context"],
)
def test_what_is_no_patch_is_refused_with_its_name(broken):
    with pytest.raises(PatchFailed, match=r"^0001-three: expected .*, received .*$"):
        parse("0001-three", broken)


def test_every_patch_says_what_and_why_and_whether_upstream_knows():
    for patch in series():
        subject, _, rest = patch.header.partition("\n\n")
        why, _, upstream = rest.rstrip("\n").partition("\n\n")
        assert re.fullmatch(r"[A-Z].{10,80}[^.]", subject), patch.name
        assert re.match(r"[^\n]", why) and why.endswith("."), patch.name
        assert re.fullmatch(r"Upstream: not reported|(Upstream: https://\S+\n?)+", upstream), patch.name
        assert max(map(len, patch.header.split("\n"))) <= 100, patch.name


def test_the_numbers_are_one_order_over_all_groups():
    assert [int(patch.name[:4]) for patch in series()] == list(range(1, len(series()) + 1))
    assert {path.name for path in PATCHES.iterdir()} == {*GROUPS, "inserted"}
    assert sum(len(series([group])) for group in GROUPS) == len(series())
    assert all(series([group]) for group in GROUPS)


def test_every_inserted_text_has_one_place():
    added = [line for patch in series() for hunk in patch.hunks for line in hunk.new if line not in hunk.old]
    assert sorted(line for line in added if line.startswith("{{")) == ["{{" + name + "}}" for name in inserted()]


def test_the_series_makes_of_horovod_what_gnu_patch_makes_of_it(horovod, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    shutil.copytree(horovod, ours)
    apply_patches(ours, series())
    if shutil.which("patch") is None:
        pytest.skip("there is no GNU patch to compare with")
    shutil.copytree(horovod, theirs)
    for file in sorted(PATCHES.glob("*/*.patch"), key=lambda file: file.name):
        subprocess.run(["patch", "-p1", "--fuzz=0", "--batch", "--quiet", "-i", file], cwd=theirs, check=True)
    for path in (path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()):
        expected = (theirs / path).read_text()
        for name, content in inserted().items():
            expected = expected.replace("{{" + name + "}}\n", content)
        assert (ours / path).read_text() == expected, path


@pytest.mark.parametrize("path", ["CMakeLists.txt", "horovod/runner/launch.py", "horovod/common/operations.cc"])
def test_the_series_stops_at_the_first_patch_of_a_file_that_is_another(horovod, path, tmp_path):
    shutil.copytree(horovod, tmp_path / "source")
    file = tmp_path / "source" / path
    file.write_text("\n" + file.read_text())
    first = next(patch.name for patch in series() if any(hunk.path == path for hunk in patch.hunks))
    with pytest.raises(PatchFailed, match=f"^{re.escape(first)}: "):
        apply_patches(tmp_path / "source", series())
