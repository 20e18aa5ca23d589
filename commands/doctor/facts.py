"""All facts that the doctor gathers on one host."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor import gpus, launchers, machine, network, software
from allstep.commands.doctor.finding import Finding, ok, warning
from allstep.commands.doctor.machine import Folder
from allstep.commands.doctor.software import Frameworks
from allstep.commands.horovod.prerequisites import check_compiler, compiler_version
from allstep.common.base.errors import UserError
from allstep.common.config.data_config import default_data_dir


@dataclass(frozen=True)
class Facts:
    """Facts about a host."""

    toolchain: Finding
    launchers: launchers.Launchers
    gpus: gpus.Gpus
    machine: machine.Machine
    disk: tuple[Folder, ...]
    interfaces: tuple[network.Interface, ...]
    software: software.Software
    frameworks: Frameworks | None
    """None if frameworks were skipped."""


def gather(data_dir: Path | None, *, with_frameworks: bool, with_data: bool) -> Facts:
    """Gather the facts about this host, while separate processes import the frameworks.

    `data_dir` is the folder of the data sets; None for the default of --data-dir.
    """
    folder = data_dir or default_data_dir()
    with ThreadPoolExecutor() as pool:
        reports = pool.submit(software.read_frameworks) if with_frameworks else None
        return Facts(
            toolchain=check_toolchain(),
            launchers=launchers.read(),
            gpus=gpus.read(),
            machine=machine.read(),
            disk=machine.read_folders(folder),
            interfaces=network.read(),
            software=software.read(folder, data=with_data),
            frameworks=reports.result() if reports else None,
        )


def check_toolchain() -> Finding:
    """Build and run a program by the tools that build Horovod; --compile needs a compiler, too.

    A warning suffices: Horovod may be built elsewhere.
    """
    try:
        check_compiler()
    except UserError as error:
        found, _, fix = str(error).partition("; ")
        return warning("compiler", found, fix)
    return ok("compiler", f"{compiler_version()}, which compiles C++20; make builds Horovod")
