"""Checks of the tools that build Horovod, compiler and make. --compile needs a compiler, too."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass

from allstep.commands.doctor.finding import Finding, fault, ok, warning
from allstep.commands.shared.reading import first_line, run_output

# A compiler that accepts -std=c++20 but lacks these headers would fail in the middle of the build.
_CXX20 = "#include <concepts>\n#include <ranges>\nint main() { return 0; }\n"
_INSTALL_COMPILER = "install GCC 11 or newer: apt-get install g++ make (or name another with CXX=...)"


@dataclass(frozen=True)
class Toolchain:
    """Build tools found on this host."""

    compiler: str | None
    """Version line of the compiler; None if there is none."""
    takes_cxx20: bool
    make: bool


def read() -> Toolchain:
    """Find the tools, and let the compiler that CMake will use ($CXX, else c++) check a program without output."""
    compiler = _words(os.environ.get("CXX") or "c++")
    version = first_line(*compiler, "--version")
    reading = (*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-")
    reads = run_output(*reading, given=_CXX20, seconds=60) if version else None
    return Toolchain(
        compiler=version,
        takes_cxx20=reads is not None,
        make=shutil.which("make") is not None,
    )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quote; no program has this name
        return [command]


def check(facts: Toolchain) -> list[Finding]:
    """Check whether Horovod can be built here. A missing tool is only a warning, since this host may not build it."""
    if facts.compiler is None:
        compiler = warning("compiler", "no C++ compiler", _INSTALL_COMPILER)
    elif not facts.takes_cxx20:
        compiler = fault("compiler", f"{facts.compiler}, which cannot compile C++20", _INSTALL_COMPILER)
    else:
        compiler = ok("compiler", f"{facts.compiler}, which compiles C++20")
    if not facts.make:
        return [compiler, warning("make", "no make, which builds Horovod", "run apt-get install make")]
    return [compiler, ok("make", "builds Horovod")]
