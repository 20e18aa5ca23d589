"""A fault of the corpus, planted into a correct script."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change that makes a correct script wrong, or leaves it correct in another way."""

    finding: str
    """Name of the finding; empty if nothing may be found."""
    script: str
    """Name of the correct script's file."""
    old: str
    """Text to replace, which occurs once."""
    new: str
    is_quick: bool = False
    """Whether it is also tested separately without `pytest -m full`."""
    is_combined: bool = False
    """Whether it is also tested together with the other such faults of its script."""
