"""Check of the tools that build Horovod, compiler and make. --compile needs a compiler, too."""

from __future__ import annotations

from allstep.commands.doctor.finding import Finding, ok, warning
from allstep.commands.horovod.prerequisites import check_compiler, compiler_version
from allstep.common.base.errors import UserError


def check() -> Finding:
    """Build and run a program by the tools of this host. A warning suffices: Horovod may be built elsewhere."""
    try:
        check_compiler()
    except UserError as error:
        found, _, fix = str(error).partition("; ")
        return warning("compiler", found, fix)
    return ok("compiler", f"{compiler_version()}, which compiles C++20; make builds Horovod")
