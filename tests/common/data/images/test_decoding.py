"""decoding: libjpeg-turbo gives the same pixels as Pillow, and leaves unusual files to Pillow. Oracle: Pillow."""

from __future__ import annotations

import io
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from allstep.common.data.images.crop import by_pillow
from allstep.common.data.images.decoding import Decoder, UnreadableImage, image_content


def photo(width: int, height: int, *, grain: float = 14) -> Image.Image:
    """Return an image of smooth colours and noise."""
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    pixels = np.asarray(colours.resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(pixels + rng.normal(scale=grain, size=pixels.shape), 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **{"quality": 90, **options})
    return stream.getvalue()


def whole(width: int, height: int) -> tuple[float, float, float, float]:
    return 0, 0, width, height


def by_libjpeg(data: bytes) -> bool:
    return Decoder()._by_libjpeg(data, whole, 224) is not None


def pillows(data: bytes) -> np.ndarray | None:
    """Return the pixels that Pillow reads, or None where it cannot read the data."""
    try:
        return np.asarray(Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB"))
    except Exception:  # Pillow raises various types for damaged data
        return None


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "image"


ORIENTED = Image.Exif()
ORIENTED[0x0112] = 6
KINDS = {
    "4:2:0": (True, "RGB", {"subsampling": 2}),
    "4:2:2": (True, "RGB", {"subsampling": 1}),
    "4:4:4": (True, "RGB", {"subsampling": 0}),
    "progressive": (True, "RGB", {"progressive": True}),
    "restarts": (True, "RGB", {"restart_marker_blocks": 4}),
    "turned by its EXIF": (True, "RGB", {"exif": ORIENTED}),
    "grey": (True, "L", {}),
    "CMYK": (False, "CMYK", {}),
    "RGB": (False, "RGB", {"keep_rgb": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(123, 91), (16, 16), (1, 1), (37, 5)])
def test_both_read_the_same_pixels(path, kind, size):
    fast, mode, options = KINDS[kind]
    data = jpeg(photo(*size).convert(mode), **options)
    assert by_libjpeg(data) == fast
    path.write_bytes(data)
    pixels, box = Decoder().decode(image_content(path), whole, 224)
    np.testing.assert_array_equal(pixels, pillows(data))
    assert pixels.dtype == np.uint8 and box == (0, 0, *size)


def test_memory_that_is_kept_holds_the_image_asked_for_alone(path):
    decoder = Decoder()
    for size in ((60, 50), (300, 200), (9, 7), (200, 300), (2500, 2300), (60, 50)):
        data = jpeg(photo(*size))
        path.write_bytes(data)
        np.testing.assert_array_equal(decoder.decode(image_content(path), whole, 2500)[0], pillows(data))


def test_damaged_files_are_read_or_refused_as_pillow_does(path):
    """600 files have bytes changed, inserted or cut off; Pillow reads some of them."""
    rng = random.Random(0)
    decoder, num_read = Decoder(), 0
    sources = [jpeg(photo(48, 40), **options) for options in ({}, {"progressive": True}, {"restart_marker_blocks": 4})]
    for _ in range(600):
        data = bytearray(rng.choice(sources))
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at:at] = rng.randbytes(3)
            case 2:
                del data[at:]
        path.write_bytes(data)
        expected = pillows(bytes(data))
        if expected is None:
            with pytest.raises(UnreadableImage):
                decoder.decode(image_content(path), whole, 224)
        else:
            np.testing.assert_array_equal(decoder.decode(image_content(path), whole, 224)[0], expected)
            num_read += 1
    assert 100 < num_read < 500


def test_a_jpeg_of_too_many_pixels_is_refused_before_there_is_memory_for_them(path):
    data = bytearray(jpeg(photo(64, 64)))
    start_of_frame = data.index(b"\xff\xc0")
    data[start_of_frame + 5 : start_of_frame + 9] = (60_000).to_bytes(2, "big") * 2
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(UnreadableImage, match="3600000000 pixels.* exceeds limit"):
        Decoder().decode(image_content(path), whole, 224)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(("side", "width"), [(100, 640), (64, 320), (50, 240), (25, 160), (12, 80), (4, 80)])
def test_a_large_jpeg_is_decoded_at_a_fraction_and_hardly_differs(path, side, width):
    """Tolerance: 1 of 255 on average and 6 at worst. A box that is off by one pixel of the result exceeds both."""
    box = (80, 50, 480, 350)
    path.write_bytes(jpeg(photo(640, 480)))
    asked = []

    def box_of(*size):
        asked.append(size)
        return box

    pixels, smaller_box = Decoder().decode(image_content(path), box_of, side)
    assert asked == [(640, 480)]  # the box refers to the whole image, whatever fraction is decoded
    assert pixels.shape[1] == width
    everything = pillows(path.read_bytes())
    expected = by_pillow(everything, box, side).astype(int)
    difference = np.abs(by_pillow(pixels, smaller_box, side) - expected)
    assert difference.mean() < 1 and difference.max() <= 6
    moved = [edge + 400 / side for edge in box]
    difference = np.abs(by_pillow(everything, moved, side) - expected)
    assert difference.mean() > 1 and difference.max() > 6
