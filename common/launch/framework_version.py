"""Versions of the frameworks that are tested; older ones are refused, newer ones tried."""

from __future__ import annotations

import re

from allstep.common.base.errors import UserError
from allstep.common.base.terminal import warn
from allstep.common.launch.placement import apparent_rank

TESTED = {"torch": ((2, 9), (2, 14)), "tensorflow": ((2, 19), (2, 21))}
"""Oldest and newest tested version (major, minor) of each framework."""


def check_version(package: str, version: str) -> None:
    """Refuse a framework that is older than the tested versions, and warn of a newer one in rank 0."""
    oldest, newest = TESTED[package]
    first, last = (".".join(map(str, numbers)) for numbers in (oldest, newest))
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < oldest:
        raise UserError(f"expected {package} {first} to {last}, received {version}; install one of these")
    if found > newest and apparent_rank() == 0:
        warn(f"{package} {version} is newer than the tested versions, {first} to {last}")
