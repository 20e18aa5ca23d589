"""Files of installed packages, which are not a user's code."""

_FOLDERS = "/site-packages/", "/dist-packages/"
"""Folders of packages; Debian's Python has the second."""


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, of this environment or of another whose packages it uses."""
    return any(folder in file for folder in _FOLDERS)
