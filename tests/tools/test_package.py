"""The wheel and the sdist, as a user gets them. Oracles: pip, the zip files, and a clean environment of Python."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from requirements import need_packages

from allstep.commands.horovod.patch_series import PATCHES, parse
from allstep.common.files.disk import texts

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 2**20
pytestmark = [pytest.mark.full, pytest.mark.launch]  # a minute, and the package index


def sources(folder: Path) -> Path:
    """Copy the tracked files, since a build writes beside them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def build(source: Path, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    need_packages("zopfli")  # `pip wheel` installs it where a build may be isolated
    return build(sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/RECORD")}


def unpacked(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Return the texts in a wheel by name that stand in a folder of the repository."""
    archive = files[f"allstep/{folder.relative_to(REPOSITORY).with_suffix('.xz')}"]
    words = lzma.decompress(archive).decode().split("\0")
    return dict(zip(words[::2], words[1::2], strict=True))


def changes(named: Mapping[str, str]) -> dict[str, list]:
    """Return what each patch changes."""
    patches = {name: parse(name, text) for name, text in named.items() if name.endswith(".patch")}
    return {name: [hunk.change() for hunk in patch.hunks] for name, patch in patches.items()}


def test_the_wheel_holds_what_users_run(wheel):
    files = contents(wheel)
    names = set(files)
    assert wheel.stat().st_size < MAX_BYTES
    assert {"allstep/py.typed", "allstep/pytorch/train.py", "allstep/pytorch/__init__.py"} <= names
    packed, studies = unpacked(files, PATCHES), REPOSITORY / "commands/study/studies"
    assert changes(packed) == changes(texts(PATCHES))
    assert packed["inserted/checks.py"] == texts(PATCHES)["inserted/checks.py"]
    assert unpacked(files, studies) == texts(studies)
    assert not [name for name in names if "benchmarks" in name or "tests" in name.split("/")]


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    source = sources(tmp_path / "source")
    program = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=source, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / made.stdout.splitlines()[-1]) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheels").mkdir()
    assert contents(build(unpacked, tmp_path / "wheels")) == contents(wheel)


def test_first_commands_in_a_clean_environment(wheel, tmp_path):
    """Without a framework: commands that need none work, and the others say what they need."""
    environment = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", wheel], check=True)

    def type_there(*words: str) -> subprocess.CompletedProcess:
        env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    assert type_there("allstep", "--version").stdout.startswith("allstep ")
    assert type_there("python", "-m", "allstep.pytorch.train", "--help").returncode == 0
    assert "python -m allstep.pytorch.train" in type_there("allstep", "hosts", "-H", "localhost:2").stdout
    doctor = type_there("allstep", "doctor", "--skip", "all-reduce")
    assert doctor.returncode == 1 and "PyTorch is not installed; run pip install 'allstep[pytorch]'" in doctor.stdout
    for words in (("allstep", "parity"), ("allstep", "horovod", "install"), ("python", "-m", "allstep.pytorch.train")):
        result = type_there(*words)
        assert result.returncode == 2, result
        assert len(result.stderr.splitlines()) == 1 and "pip install 'allstep[pytorch]'" in result.stderr
    imported = type_there("python", "-c", "from allstep.pytorch import Session")
    assert imported.stderr.splitlines()[-1].startswith(
        "ImportError: expected torch, received an environment without it"
    )
