"""Wheels that others have built: taken if name and SHA-256 fit. Oracle: the files of the folder."""

from __future__ import annotations

import pytest

from allstep.commands.horovod import wheel

NAME = "horovod-0.28.1+allstep.65.p0.torch2.14.1.cpu-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(params=["folder", "URL"])
def offered(request, tmp_path, monkeypatch):
    """Return a folder with a wheel and its sum, which the variable names as a folder or as a URL."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / NAME).write_bytes(b"a wheel")
    wheel.write_sum(folder / NAME)
    monkeypatch.setenv(wheel.VARIABLE, str(folder) if request.param == "folder" else folder.as_uri())
    return folder


def test_a_wheel_that_fits(offered, tmp_path):
    found = wheel.fitting(NAME, tmp_path / "kept")
    assert found and found.name == NAME and found.read_bytes() == b"a wheel"


def test_another_name_does_not_fit(offered, tmp_path, capsys):
    assert wheel.fitting(NAME.replace("2.14.1", "2.13.0"), tmp_path) is None
    assert "has no horovod" in capsys.readouterr().out


def test_another_content_does_not_fit(offered, tmp_path, capsys):
    (offered / NAME).write_bytes(b"another")
    assert wheel.fitting(NAME, tmp_path) is None
    assert "is not that of SHA256SUMS" in capsys.readouterr().out


def test_a_folder_without_sums_offers_nothing(offered, tmp_path, capsys):
    (offered / wheel.SUMS).unlink()
    assert wheel.fitting(NAME, tmp_path) is None
    assert "no wheel from ALLSTEP_HOROVOD_WHEELS" in capsys.readouterr().out


def test_without_the_variable_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(wheel.VARIABLE, raising=False)
    assert wheel.fitting(NAME, tmp_path) is None
    assert capsys.readouterr().out == ""


def test_sums_are_added_and_replaced(offered):
    (offered / "other.whl").write_bytes(b"other")
    wheel.write_sum(offered / "other.whl")
    wheel.write_sum(offered / "other.whl")
    assert list(wheel.read_sums((offered / wheel.SUMS).read_text())) == sorted([NAME, "other.whl"])
