"""Leave our own benchmarks, which need a checkout, out of the wheel; everything else is in setup.cfg."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Build without allstep.benchmarks, except for an editable installation."""

    def run(self):
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith("allstep.benchmarks")]
            self.__dict__.pop("data_files", None)
        super().run()


setup(cmdclass={"build_py": BuildPy})
