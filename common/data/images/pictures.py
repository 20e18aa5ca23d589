"""Pictures that a program passes, as paths, Pillow's images or arrays, made to samples as validation makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.data.images.crop import centre_box
from allstep.common.data.images.decoding import UnreadableImage, image_content, in_rgb
from allstep.common.data.images.encoded import Reader


class PictureReader:
    """Reads pictures as `encoded.EncodedSplit` reads files in validation."""

    def __init__(self, size: int, *, turns: bool) -> None:
        """`size` and `turns`: see `Reader`."""
        self._reader, self._turns = Reader(size, turns=turns), turns

    def read(self, picture: Any) -> np.ndarray:
        """Return the pixels of a picture, uint8 (size, size, 3).

        Raises:
            UserError: it is none, or cannot be read.
        """
        if isinstance(picture, (str, Path)):
            try:
                return self._reader.read(image_content(Path(picture)), centre_box)
            except UnreadableImage as error:
                raise UserError(
                    f"expected an image in {picture}, received what cannot be read as one ({error}); replace it"
                ) from None
        if hasattr(picture, "convert"):
            if (file := getattr(picture, "filename", "")) and getattr(picture, "tile", None):
                return self.read(file)  # not loaded yet, so it is as in its file, which is read as in training
            return self._resized(_pixels_of(picture, turns=self._turns))
        return self._resized(_as_rgb(np.asarray(picture)))

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        height, width, _ = pixels.shape
        return np.array(self._reader.resample(pixels, centre_box(width, height)))


def _pixels_of(image: Any, *, turns: bool) -> np.ndarray:
    from PIL import ImageOps

    if image.mode.startswith(("I", "F")):
        raise UserError(f"expected a picture of 8 bits a channel, received mode {image.mode}; convert it")
    return in_rgb(ImageOps.exif_transpose(image) if turns else image)


def _as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return an array of a picture, grey or with 1, 3 or 4 channels last, as uint8 (height, width, 3)."""
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or pixels.dtype != np.uint8:
        raise UserError(
            f"expected a picture as a path, an image of Pillow or uint8 (height, width, channels), received "
            f"{quote(f'{pixels.dtype} {pixels.shape}')}; convert it"
        )
    return np.ascontiguousarray(np.broadcast_to(pixels[..., :3], (*pixels.shape[:2], 3)))
