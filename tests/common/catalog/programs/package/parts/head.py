"""Module that imports from the package above."""

from .. import __name__ as PACKAGE

NAME = f"head of {PACKAGE}"
