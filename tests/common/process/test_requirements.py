"""Lines about missing packages. Oracle: the command that installs them, in an environment that is no checkout's."""

from __future__ import annotations

import pytest

from allstep.common.base.errors import UserError
from allstep.common.process import requirements


@pytest.fixture
def lacking(monkeypatch):
    """Return the names of packages that seem not to be installed."""
    names: set[str] = set()
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None if name in names else object())
    monkeypatch.setattr(requirements, "setup_command", lambda: "allstep horovod install")
    monkeypatch.setattr(requirements, "extra_command", lambda extra: f"pip install 'allstep[{extra}]'")
    return names


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("torch", "expected torch, received an environment without it; run pip install 'allstep[pytorch]'"),
        ("timm", "expected timm, received an environment without it; run pip install 'allstep[pytorch]'"),
        ("pyarrow", "expected pyarrow, received an environment without it; run pip install 'allstep[data]'"),
        ("horovod", "expected horovod, received an environment without it; run allstep horovod install"),
    ],
)
def test_a_missing_package_is_a_line(lacking, package, line):
    lacking.add(package)
    assert requirements.missing(package) == line
    assert requirements.missing_part(ModuleNotFoundError("x", name=f"{package}.part")) == line
    with pytest.raises(UserError) as error:
        requirements.need([package])
    assert str(error.value) == line


def test_the_framework_is_named_before_its_parts(lacking):
    lacking.update(("tensorflow", "keras"))
    assert requirements.missing("keras", by="x").startswith("expected tensorflow for x, received")


def test_frameworks_and_horovod(lacking):
    requirements.need_frameworks(["pytorch", "tensorflow"], horovod=True)
    lacking.add("horovod")
    requirements.need_frameworks(["pytorch"])
    with pytest.raises(UserError, match="expected horovod for allstep parity"):
        requirements.need_frameworks(["pytorch"], horovod=True, by="allstep parity")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            FileNotFoundError(2, "x", "torchrun"),
            "torchrun on the PATH, received none; run pip install 'allstep[pytorch]'",
        ),
        (FileNotFoundError(2, "x", "horovodrun"), "horovodrun on the PATH, received none; run allstep horovod install"),
    ],
)
def test_a_missing_launcher_is_a_line(lacking, error, line):
    assert requirements.missing_part(error) == f"expected {line}"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("x", name="torch"),  # installed, and broken
        ModuleNotFoundError("x", name="users_module"),
        FileNotFoundError(2, "x", "data.npz"),
        ValueError("torch"),
    ],
)
def test_other_errors_stay_what_they_are(lacking, error):
    assert requirements.missing_part(error) is None
