"""Checks of NVIDIA GPUs: driver, toolkit, links between GPUs, and the library files that a framework loads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, several, warning
from allstep.commands.doctor.software import Frameworks, Installation
from allstep.commands.shared.machine import run_output
from allstep.common.base.checkout import setup_command
from allstep.common.catalog.strategies import TITLES
from allstep.common.process.installation import loaded_twice

# First driver for each CUDA release (release notes, table of minimum driver versions).
_OLDEST_DRIVERS = {"12": 525, "13": 580}
_LIBRARIES = ("NCCL", "cuDNN", "cuBLAS")
# Links in the table of `nvidia-smi topo -m`: SYS crosses CPU sockets; the others stay on one socket or use NVLink.
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class Gpus:
    """GPUs as reported by the driver, without any framework."""

    devices: int
    """Number of GPUs on the PCI bus, with or without a driver."""
    names: tuple[str, ...]
    driver: str | None
    toolkit: str | None
    """Version of nvcc on the PATH; the wheels of the frameworks need none."""
    links: dict[str, str]
    """Link between each pair of GPUs, as in "0-1": "NV18"."""


def read() -> Gpus:
    """Query nvidia-smi, nvcc and the PCI bus (vendor 0x10de, class 0x03: display)."""
    rows = (run_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    cards = [row.rpartition(", ") for row in rows]
    release = re.search(r"release ([\d.]+)", run_output("nvcc", "--version") or "")
    buses = Path("/sys/bus/pci/devices").glob("*/vendor")
    return Gpus(
        devices=sum(_is_gpu(vendor) for vendor in buses),
        names=tuple(name for name, _, _ in cards),
        driver=cards[0][2] if cards else None,
        toolkit=release[1] if release else None,
        links=links(run_output("nvidia-smi", "topo", "-m") or ""),
    )


def _is_gpu(vendor: Path) -> bool:
    return vendor.read_text().strip() == "0x10de" and vendor.with_name("class").read_text().startswith("0x03")


def links(topology: str) -> dict[str, str]:
    """Parse the link between each pair of GPUs from the table that `nvidia-smi topo -m` prints."""
    rows = [line.split() for line in topology.splitlines()]
    table = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    found = {f"{one}-{other}": table[one][other] for one, other in combinations(range(len(table)), 2)}
    return {pair: link for pair, link in found.items() if _LINK.fullmatch(link)}


def check(facts: Gpus, frameworks: Frameworks | None) -> list[Finding]:
    """Check the GPUs and, unless frameworks were skipped, whether these can use them."""
    if facts.driver is None:
        if facts.devices:
            fix = "install NVIDIA's driver, of release 580 or newer, and nvidia-smi"
            return [fault("gpus", f"{facts.devices} on the PCI bus, without a driver", fix)]
        return [ok("gpus", "none: training on CPUs")]
    toolkit = f", toolkit {facts.toolkit}" if facts.toolkit else ", no toolkit, which nothing here needs"
    counted = {name: facts.names.count(name) for name in facts.names}
    names = ", ".join(f"{number} x {name}" for name, number in counted.items())
    found = [ok("gpus", f"{names}, driver {facts.driver}{toolkit}")]
    if len(counted) > 1:
        found.append(warning("gpus", f"unlike ones: {names}", "give each job one kind: the slowest sets the pace"))
    found += _check_links(facts.links)
    for name, one in frameworks.installed.items() if frameworks else ():
        found += _check_framework(name, one, facts)
    return found


def _check_links(links: Mapping[str, str]) -> list[Finding]:
    across = [pair for pair, link in links.items() if link == "SYS"]
    if across:
        fix = "give a job the GPUs of one socket (CUDA_VISIBLE_DEVICES), or accept the slower all-reduce"
        return [warning("gpu links", f"GPUs {several(across)} reach each other across CPU sockets (SYS)", fix)]
    kinds = ", ".join(f"{pair} {link}" for pair, link in list(links.items())[:6])
    return [ok("gpu links", kinds)] if links else []


def _check_framework(name: str, one: Installation, facts: Gpus) -> list[Finding]:
    assert facts.driver  # the caller has checked it
    title, oldest = TITLES[name], _OLDEST_DRIVERS.get((one.cuda or "").partition(".")[0])
    if one.cuda is None:
        return [warning(name, f"{title} is built for CPUs, and there are GPUs", f"run {setup_command(gpu=True)}")]
    if oldest and int(facts.driver.partition(".")[0]) < oldest:
        found = f"{title} needs driver {oldest} or newer for CUDA {one.cuda}, and there is {facts.driver}"
        return [fault("driver", found, f"install driver {oldest} or newer")]
    if one.num_gpus < len(facts.names):
        fix = "look at CUDA_VISIBLE_DEVICES, and at what nvidia-smi says"
        return [warning(name, f"{title} sees {one.num_gpus} of {len(facts.names)} GPUs", fix)]
    findings = []
    if twice := loaded_twice(one.libraries):
        library, paths = next(iter(twice.items()))
        fix = "leave one of them out of LD_LIBRARY_PATH, or install the framework anew"
        findings.append(fault(f"{name} libraries", f"loads {library} twice: {' and '.join(paths)}", fix))
    files = [f"{library} {one.libraries[library][0]}" for library in _LIBRARIES if library in one.libraries]
    if files:
        findings.append(ok(f"{name} libraries", ", ".join(files)))
    if one.no_peer_access:
        pairs = several([f"{first}-{second}" for first, second in one.no_peer_access])
        fix = "look for IOMMU or ACS in the BIOS, or expect copies through the CPU's memory"
        findings.append(warning("gpu peers", f"no peer access between GPUs {pairs}", fix))
    return findings
