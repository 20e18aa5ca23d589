"""Make the wheel small: without our benchmarks, patches to Horovod and studies as a file each, and well compressed.

Everything else is in setup.cfg.
"""

import lzma
import re
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Build without allstep.benchmarks, which need a checkout, except for an editable installation."""

    def run(self):
        if self.editable_mode:
            super().run()
            return
        self.packages = [name for name in self.packages if not name.startswith("allstep.benchmarks")]
        self.__dict__.pop("data_files", None)
        super().run()
        for folder in ("commands/horovod/patches", "commands/study/studies"):
            Path(self.build_lib, "allstep", f"{folder}.xz").write_bytes(archive(Path(folder)))


def archive(folder):
    """Return the texts in a folder as one compressed file, which `common/files/disk.py` reads."""
    texts = {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*.*") if file.is_file()}
    texts = {name: packed(text) if name.endswith(".patch") else text for name, text in sorted(texts.items())}
    # Texts about the same file compress better next to each other.
    ordered = sorted(texts.items(), key=lambda item: item[1].partition("\n--- a/")[2].partition("\n")[0])
    words = [word for item in ordered for word in item]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]  # text is not aligned
    return lzma.compress("\0".join(words).encode(), filters=filters)


def packed(patch):
    """Return a patch without the words before it that no program reads and with a line around what only adds lines."""
    lines, result = patch[patch.index("\n--- ") :].split("\n"), []
    while lines:
        line = lines.pop(0)
        if not (found := re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)):
            result.append(line)
            continue
        hunk, old, new = [], int(found[2] or 1), int(found[4] or 1)
        while old or new:
            hunk.append(lines.pop(0))
            old, new = old - (hunk[-1][0] != "+"), new - (hunk[-1][0] != "-")
        changed = [number for number, one in enumerate(hunk) if one[0] != " "]
        adds = all(one[0] != "-" for one in hunk)
        begin = max(0, changed[0] - adds)
        hunk = hunk[begin : changed[-1] + (2 if adds and not changed[0] else 1)]
        old, new = (sum(one[0] != sign for one in hunk) for sign in "+-")
        result += [f"@@ -{int(found[1]) + begin},{old} +{int(found[3]) + begin},{new} @@", *hunk]
    return "\n".join(result)


class Compressor:
    """Counterpart of zlib.compressobj by zopfli, whose streams are 2.4 % smaller than those of zlib's best level."""

    def __init__(self):
        self._parts = []

    def compress(self, data):
        self._parts.append(data)
        return b""

    def flush(self):
        import zopfli.zlib  # a build need that an editable installation does without

        return zopfli.zlib.compress(b"".join(self._parts))[2:-4]  # without the header and checksum of zlib's format


class BdistWheel(bdist_wheel):
    """Write the wheel by `Compressor`; zipfile offers no public way to name one."""

    def run(self):
        zipfile._get_compressor = lambda kind, level=None: Compressor() if kind == zipfile.ZIP_DEFLATED else None
        super().run()


# Without the tables for readers of the repository, whose links lead to its files.
README = Path("README.md").read_text().partition("\n## Beside others")[0]
setup(long_description=README, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
