"""Module of a package with relative imports."""

from .parts.head import NAME


def build():
    from . import parts

    return NAME, parts.__name__
