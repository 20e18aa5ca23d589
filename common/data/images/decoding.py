"""Image decoding: JPEG by libjpeg-turbo (simplejpeg), which releases the GIL, everything else by Pillow.

The bytes of a file decide which library decodes it: libjpeg-turbo takes colour (YCbCr) and grey JPEG; Pillow takes
other formats, CMYK, and every JPEG in which libjpeg-turbo finds an error, since Pillow tolerates small errors and has
better messages for the others. Both give the same pixels for an intact file.
"""

import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.data.images.crop import Box
from allstep.common.files.disk import regular

IMAGE_ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif", ".ppm", ".pgm",
    ".pbm", ".pnm", ".jp2", ".j2k", ".jpx", ".ico", ".avif",
)  # fmt: skip
"""Endings of the files in a folder that are images, in lower case."""
FORMATS = (
    "JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "PPM", "JPEG2000", "ICO", "AVIF",
)  # fmt: skip
"""Pillow's formats that are opened, without rare ones and those that take damaged files of other formats for theirs."""
MAX_FILE_BYTES = 2**28
"""Maximum size of an image file: about three bytes for each pixel that Pillow allows."""
REDUCING_GAP = 2
"""A JPEG is decoded at 1/2 to 1/8 of its size if the box still has this many times the pixels needed, in both
directions. Pillow has the same rule and number for thumbnails: the result is close to that at full size."""
MAX_GPU_SIDE = 4096
"""Maximum width and height of an image that a GPU decodes: 64 of them at once take 3.2 GB of its memory."""
_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")
_ORIENTATION = 0x0112
"""EXIF's tag of how the camera was held."""
_KEPT_BYTES = 2**24


class UnreadableImage(Exception):
    """An image that cannot be read; the message gives the reason."""


class Decoder:
    """Decoder of one image at a time; each thread needs its own.

    Images of up to 16 MiB are decoded into memory that is reused: mapping it again would take a third of the time.
    """

    def __init__(self, *, turns: bool = False) -> None:
        """Create a decoder that turns images as their EXIF orientation says, if `turns`."""
        self._memory, self._turns = np.empty(0, dtype=np.uint8), turns

    def decode(self, data: bytes, box_of: Callable[[int, int], Box], size: int) -> tuple[np.ndarray, Box]:
        """Decode an image file to pixels, uint8 (height, width, 3), valid until the next call, and a box in them.

        Grey and CMYK are converted to RGB, transparency is dropped; of several frames or pages the first is taken.
        Raises UnreadableImage if the image is damaged, too large or has more than 8 bits per channel.

        Args:
            box_of: returns the box for an image's width and height.
            size: number of pixels that the box will be resized to; the image may be decoded at a reduced size.
        """
        if self._turns and is_turned(data):
            return _by_pillow(data, box_of, turns=True)
        return self._by_libjpeg(data, box_of, size) or _by_pillow(data, box_of)

    def _by_libjpeg(self, data: bytes, box_of: Callable[[int, int], Box], size: int) -> tuple[np.ndarray, Box] | None:
        """Decode by libjpeg-turbo; return None if the image is left to Pillow."""
        import simplejpeg

        if (dimensions := _jpeg_dimensions(data)) is None:
            return None
        width, height = dimensions
        box = left, top, right, bottom = box_of(width, height)
        min_width = math.ceil(REDUCING_GAP * size * width / (right - left))
        min_height = math.ceil(REDUCING_GAP * size * height / (bottom - top))
        memory = self._keep(3 * width * height)
        try:
            pixels = simplejpeg.decode_jpeg(
                data, min_width=min_width, min_height=min_height, min_factor=2, buffer=memory
            )
        except ValueError:
            return None
        return pixels, _scaled(box, pixels.shape[1] / width, pixels.shape[0] / height)

    def _keep(self, num_bytes: int) -> np.ndarray | None:
        if num_bytes > _KEPT_BYTES:
            return None
        if num_bytes > len(self._memory):
            self._memory = np.empty(num_bytes, dtype=np.uint8)
        return self._memory


def image_content(path: Path) -> bytes:
    """Return the bytes of an image file.

    Raises UnreadableImage if the file does not exist, cannot be read or is too large.
    """
    try:
        with open(path, "rb", opener=regular) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_FILE_BYTES:
                raise UnreadableImage(f"it has {size} bytes, more than {MAX_FILE_BYTES}")
            return stream.read(size)
    except OSError as error:
        raise UnreadableImage(error.strerror or error) from error


def dimensions_on_gpu(data: bytes) -> tuple[int, int] | None:
    """Return width and height of an image that a GPU can decode, or None if it is left to `Decoder`.

    Images left to `Decoder` are those that Pillow reads, very large ones, and those without a JPEG's end marker: they
    may be truncated, which nvJPEG does not reliably detect.
    """
    dimensions = _jpeg_dimensions(data) if data.endswith(_JPEG_END) else None
    return dimensions if dimensions and max(dimensions) <= MAX_GPU_SIDE else None


def _jpeg_dimensions(data: bytes) -> tuple[int, int] | None:
    """Return width and height of an image that libjpeg-turbo can decode, or None if it is left to Pillow."""
    import simplejpeg
    from PIL.Image import MAX_IMAGE_PIXELS

    if not data.startswith(_JPEG):
        return None
    try:
        *sides, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    height, width = (int(side) for side in sides)
    return (width, height) if colours in _COLOURS and width * height <= (MAX_IMAGE_PIXELS or math.inf) else None


def _scaled(box: Box, horizontal: float, vertical: float) -> Box:
    left, top, right, bottom = box
    return left * horizontal, top * vertical, right * horizontal, bottom * vertical


def is_turned(data: bytes) -> bool:
    """Return whether an image's EXIF orientation turns or mirrors it."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS).getexif().get(_ORIENTATION, 1) in range(2, 9)
    except Exception:  # a damaged file; decoding it says so
        return False


def _by_pillow(data: bytes, box_of: Callable[[int, int], Box], *, turns: bool = False) -> tuple[np.ndarray, Box]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.mode.startswith(("I", "F")):
            raise UnreadableImage(f"mode {image.mode} has more than 8 bits a channel; convert it to 8")
        image = ImageOps.exif_transpose(image) if turns else image
        return in_rgb(image), box_of(*image.size)
    except UnidentifiedImageError as error:
        raise UnreadableImage("it is neither JPEG nor PNG, nor another usual format") from error
    except Exception as error:  # on damaged files Pillow raises OSError, SyntaxError, ValueError, ...
        raise UnreadableImage(error) from error


def in_rgb(image: Any) -> np.ndarray:
    """Return the pixels of an image of Pillow in RGB, without what it says of their transparency."""
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns of the other way
    return np.asarray(image.convert("RGB"))
