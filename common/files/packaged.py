"""Texts that come with allstep in a folder; a wheel has them in one compressed file, which takes half the room."""

import functools
from pathlib import Path

from allstep.common.base.errors import UserError


@functools.cache
def texts(folder: Path) -> dict[str, str]:
    """Return the texts in `folder` and the folders in it, by path in order, from FOLDER.xz if there is no folder.

    Raises UserError if Python was built without the library that reads this file.
    """
    if folder.is_dir():
        files = [file for file in sorted(folder.rglob("*.*")) if file.is_file()]
        return {file.relative_to(folder).as_posix(): file.read_bytes().decode() for file in files}
    try:
        import lzma
    except ImportError:
        raise UserError(f"{folder.name} needs a Python with lzma; build it where liblzma is installed") from None
    words = lzma.decompress(folder.with_suffix(".xz").read_bytes()).decode().split("\0")
    return dict(sorted(zip(words[::2], words[1::2], strict=True)))
