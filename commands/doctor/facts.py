"""All that the doctor observes on one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor import disk, frameworks, gpus, launchers, machine, network, software, toolchain
from allstep.common.config.data_config import default_data_dir


@dataclass(frozen=True)
class Facts:
    """What was found on a host."""

    toolchain: toolchain.Toolchain
    launchers: launchers.Launchers
    gpus: gpus.Gpus
    machine: machine.Machine
    disk: tuple[disk.Folder, ...]
    interfaces: tuple[network.Interface, ...]
    software: software.Software
    frameworks: frameworks.Frameworks | None
    """None where they were left out."""


def gather(data_dir: Path | None, *, with_frameworks: bool, with_data: bool) -> Facts:
    """Observe this host; frameworks report in processes of their own meanwhile.

    Args:
        data_dir: where data sets are; None for where the trainers look without --data-dir.
    """
    folder = data_dir or default_data_dir()
    with ThreadPoolExecutor() as pool:
        reports = pool.submit(frameworks.read) if with_frameworks else None
        return Facts(
            toolchain=toolchain.read(),
            launchers=launchers.read(),
            gpus=gpus.read(),
            machine=machine.read(),
            disk=disk.read(folder),
            interfaces=network.read(),
            software=software.read(folder, data=with_data),
            frameworks=reports.result() if reports else None,
        )
