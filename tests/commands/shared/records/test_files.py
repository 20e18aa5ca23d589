"""Result files as records. Oracles: files of an earlier allstep, compared value by value, and the fields' types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allstep.commands.compare.records import ComparisonResult, Sample, Verdict
from allstep.commands.forecast.section import ForecastsResult, ValidationResult
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult
from allstep.commands.shared.records.measured import BenchmarkResult
from allstep.common.base.errors import UserError

WRITTEN_BEFORE = json.loads(Path(__file__).with_name("written_before.json").read_text())
"""Contents by kind of file; longer lists are shortened and names of machines replaced."""
KINDS = {
    "compare": ComparisonResult,
    "sample": Sample,
    "failed sample": Sample,
    "verdict": Verdict,
    "collectives": CollectivesResult,
    "predict": ForecastsResult,
    "validation": ValidationResult,
    "benchmark": BenchmarkResult,
}


def lost(before: object, after: object, where: str = "result") -> list[str]:
    """Return the places of a JSON value that are missing or different in another one."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            placement
            for key, value in before.items()
            for placement in lost(value, after.get(key, "nothing"), f"{where}.{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [placement for index, pair in pairs for placement in lost(*pair, f"{where}[{index}]")]
    return [] if before == after else [where]


@pytest.mark.parametrize("name", KINDS)
def test_what_was_written_before_is_read_and_written_again(name, tmp_path):
    before = tmp_path / "before.json"
    before.write_text(json.dumps(WRITTEN_BEFORE[name]))
    record = files.read(KINDS[name], before)
    files.write(tmp_path / "after.json", record)
    written = {**WRITTEN_BEFORE[name], "format": KINDS[name].FORMAT}  # a former name becomes the present one
    assert lost(written, json.loads((tmp_path / "after.json").read_text())) == []
    assert files.read(KINDS[name], tmp_path / "after.json") == record


@pytest.mark.parametrize("name", KINDS)
def test_every_field_is_looked_at(name, tmp_path):
    """An error names any field of a record that has a value of another type; keys that no record has are ignored."""
    content = WRITTEN_BEFORE[name]
    record = files.read_input(KINDS[name], write(tmp_path, content))
    for key in content:
        changed = write(tmp_path, {**content, key: {"not": ["a", {"value": None}]}})
        if key in ("format", "version") or (key in vars(record) and key != "samples"):
            with pytest.raises(UserError, match=rf"result\.{key}[ .]|expected allstep-"):
                files.read_input(KINDS[name], changed)
    assert files.read_input(KINDS[name], write(tmp_path, {**content, "more": 1})) == record


def write(folder: Path, content: object) -> Path:
    (folder / "result.json").write_text(json.dumps(content))
    return folder / "result.json"


def test_output_through_a_link_leaves_the_link(tmp_path):
    (tmp_path / "real.json").write_text("before")
    for name, target in (("link", "real.json"), ("broken", "new.json"), ("second", "link")):
        (tmp_path / name).symlink_to(target)
        with files.written_whole(files.output_file(str(tmp_path / name))) as stream:
            stream.write(name.encode())
        assert (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == name
    assert (tmp_path / "real.json").read_text() == "second"
