"""Make the wheel small: without our own benchmarks, the patches to Horovod as one file, and well compressed.

Everything else is in setup.cfg.
"""

import lzma
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
        folder = Path("commands/horovod/patches")
        texts = {file.relative_to(folder).as_posix(): file.read_text() for file in sorted(folder.glob("*/*.*"))}
        # Texts about the same file compress better next to each other.
        ordered = sorted(texts.items(), key=lambda item: item[1].partition("\n--- a/")[2].partition("\n")[0])
        words = [word for item in ordered for word in item]
        packed = lzma.compress("\0".join(words).encode(), preset=lzma.PRESET_EXTREME)
        Path(self.build_lib, "allstep/commands/horovod/patches.xz").write_bytes(packed)


class Compressor:
    """Counterpart of zlib.compressobj by libdeflate, whose streams are 2 % smaller than those of zlib's best level."""

    def __init__(self):
        self._parts = []

    def compress(self, data):
        self._parts.append(data)
        return b""

    def flush(self):
        import deflate  # a build need that an editable installation does without

        return bytes(deflate.deflate_compress(b"".join(self._parts), 12))


class BdistWheel(bdist_wheel):
    """Write the wheel by `Compressor`; zipfile offers no public way to name one."""

    def run(self):
        zipfile._get_compressor = lambda kind, level=None: Compressor() if kind == zipfile.ZIP_DEFLATED else None
        super().run()


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
