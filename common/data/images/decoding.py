"""Image files as pixels: JPEG by libjpeg-turbo (simplejpeg), which leaves the interpreter free, the rest by Pillow.

The bytes of a file decide who reads it. libjpeg-turbo takes JPEG in colour (YCbCr) and in grey; Pillow takes PNG, CMYK,
and every JPEG that libjpeg-turbo finds a fault with, for it reads on over small ones and says what is wrong with the
others. Where both read a file whole, they see the same pixels.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from allstep.common.data.images.crop import Box
from allstep.common.files.regular_file import regular

MAX_FILE_BYTES = 2**28
"""Of an image: three bytes for each pixel that Pillow allows."""
REDUCING_GAP = 2
"""A JPEG is decoded at 1/2 to 1/8 of its size where the box keeps this many pixels for each one that is asked for, both
ways. Pillow has the same rule and number for thumbnails: the result is close to that of the whole image."""
MAX_GPU_SIDE = 4096
"""Of an image that a GPU decodes, in pixels: 64 of them at once take 3.2 GB of its memory."""
_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")
_KEPT_BYTES = 2**24


class UnreadableImage(Exception):
    """The message says why."""


class Decoder:
    """Decodes one image after the other; for one thread.

    Images of up to 16 MiB are decoded into memory that is kept: to map it anew for each takes a third of the time.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def decode(self, data: bytes, box_of: Callable[[int, int], Box], size: int) -> tuple[np.ndarray, Box]:
        """The pixels of a JPEG or PNG file's bytes, uint8 (height, width, 3), and a box in them; until the next call.

        Grey and CMYK are converted to RGB, transparency is dropped.

        Args:
            box_of: the box of an image of that width and height.
            size: pixels that the box will be resized to. The image may be reduced as far as that allows.

        Raises:
            UnreadableImage: it is damaged, too large or of more than 8 bits a channel.
        """
        return self._by_libjpeg(data, box_of, size) or _by_pillow(data, box_of)

    def _by_libjpeg(self, data: bytes, box_of: Callable[[int, int], Box], size: int) -> tuple[np.ndarray, Box] | None:
        """None for what is Pillow's to read."""
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
    """What an image file holds.

    Raises:
        UnreadableImage: it is not there, or too large.
    """
    try:
        with open(path, "rb", opener=regular) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_FILE_BYTES:
                raise UnreadableImage(f"it has {size} bytes, more than {MAX_FILE_BYTES}")
            return stream.read(size)
    except OSError as error:
        raise UnreadableImage(error.strerror or error) from error


def dimensions_on_gpu(data: bytes) -> tuple[int, int] | None:
    """Width and height of an image that a GPU is to decode; None for what is left to `Decoder`.

    That is what is Pillow's to read, what is very large, and what does not end as a JPEG does: it may be cut short,
    which nvJPEG does not promise to notice.
    """
    dimensions = _jpeg_dimensions(data) if data.endswith(_JPEG_END) else None
    return dimensions if dimensions and max(dimensions) <= MAX_GPU_SIDE else None


def _jpeg_dimensions(data: bytes) -> tuple[int, int] | None:
    """Width and height of what libjpeg-turbo is to read; None for what is Pillow's."""
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


def _by_pillow(data: bytes, box_of: Callable[[int, int], Box]) -> tuple[np.ndarray, Box]:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        if image.mode.startswith(("I", "F")):
            raise UnreadableImage(f"mode {image.mode} has more than 8 bits a channel")
        return np.asarray(image.convert("RGB")), box_of(*image.size)
    except UnidentifiedImageError as error:
        raise UnreadableImage("it is neither JPEG nor PNG") from error
    except Exception as error:  # Pillow's own: damaged files make it raise OSError, SyntaxError, ValueError, ...
        raise UnreadableImage(error) from error
