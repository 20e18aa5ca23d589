"""--decode gpu: decode JPEG files on the rank's device. TensorFlow has no decoder for this.

The loader passes the bytes of files with their boxes and flips, which depend on (seed, epoch, index). torchvision
decodes whole images, with nvJPEG on a GPU. Matrix products then resize their boxes by Pillow's bilinear filter. Each
image is resized separately, so its pixels do not depend on the rest of the batch.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from allstep.common.base.errors import UserError, summary, warn
from allstep.common.data.images.crop import cut
from allstep.common.data.images.encoded import EncodedImage

_FILES_AT_ONCE = 64


class JpegDecoder:
    """Converts the inputs that the loader gives under --decode gpu to those of --decode cpu, except for rounding."""

    def __init__(self, size: int, device: torch.device, *, tells: bool) -> None:
        """Refuse a device on which torchvision cannot decode files.

        Args:
            size: height and width in pixels of the images given to the network.
            tells: whether to warn, once, if the CPU has to decode files.
        """
        self._size, self._device, self._tells = size, device, tells
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            self._decode_all([torch.from_numpy(_small_file())])
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"expected a torchvision that decodes JPEG files on {device} for --decode gpu, received one that does "
                f"not ({summary(error)}); install the one of torch's own build, or give --decode cpu"
            ) from error

    def __call__(self, images: np.ndarray) -> torch.Tensor:
        """Return the pixels, uint8 (n, size, size, 3), of the n inputs that `EncodedSplit` has read.

        Raises UserError if neither the device nor the CPU can decode an image.
        """
        if self._stream is None:
            return self._pixels(images)
        with torch.cuda.stream(self._stream):
            pixels = self._pixels(images)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        pixels.record_stream(computing)
        return pixels

    def _pixels(self, images: np.ndarray) -> torch.Tensor:
        pixels = torch.empty((len(images), self._size, self._size, 3), dtype=torch.uint8, device=self._device)
        encoded = {number: image for number, image in enumerate(images) if isinstance(image, EncodedImage)}
        on_cpu = {number: image for number, image in enumerate(images) if not isinstance(image, EncodedImage)}
        for begin in range(0, len(encoded), _FILES_AT_ONCE):
            numbers = [*encoded][begin : begin + _FILES_AT_ONCE]
            files = [torch.from_numpy(encoded[number].content) for number in numbers]
            decoded = {}
            for number, image in zip(numbers, self._decode(files), strict=True):
                if image is None:
                    on_cpu[number] = encoded[number].pixels()
                else:
                    decoded[number] = image
            if decoded:
                seen = [encoded[number] for number in decoded]
                pixels[[*decoded]] = resized([*decoded.values()], seen, self._size)
        for number, image in on_cpu.items():
            pixels[number] = torch.from_numpy(image)
        if on_cpu and self._tells:
            self._tells = False
            warn(
                f"the CPU decodes {len(on_cpu)} of {len(images)} images of a batch under --decode "
                "gpu, and others like them: PNG, CMYK, damaged or of more than 4096 pixels a side"
            )
        return pixels

    def _decode(self, files: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return whole images, uint8 (3, height, width), and None for a file that the decoder does not accept."""
        try:
            return [*self._decode_all(files)]
        except RuntimeError:  # the decoder does not report which file failed
            return [None] if len(files) == 1 else [image for file in files for image in self._decode([file])]

    def _decode_all(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg  # takes a second

        if self._stream:
            # torchvision 0.29 decodes on another stream into memory of this one, and does not wait for kernels of this
            # stream that still read earlier images from that memory.
            self._stream.synchronize()
        return cast("list[torch.Tensor]", decode_jpeg(files, mode=ImageReadMode.RGB, device=self._device))


def resized(images: Sequence[torch.Tensor], files: Sequence[EncodedImage], size: int) -> torch.Tensor:
    """Crop, flip and resize each image, uint8 (3, height, width), to the network's input: uint8 (n, size, size, 3)."""
    parts, boxes = zip(
        *(cut(image.permute(1, 2, 0), file.box, size) for image, file in zip(images, files, strict=True)), strict=True
    )
    # A mirrored image is read from right to left.
    boxes = [
        (right, top, left, bottom) if file.flipped else (left, top, right, bottom)
        for (left, top, right, bottom), file in zip(boxes, files, strict=True)
    ]
    left, top, right, bottom = torch.tensor(boxes, dtype=torch.float32, device=images[0].device).unbind(1)
    down = filter_weights(top, bottom, [part.shape[0] for part in parts], size)
    across = filter_weights(left, right, [part.shape[1] for part in parts], size)
    pixels = torch.stack(
        [
            rows[:, : part.shape[0]] @ (part.permute(2, 0, 1).to(torch.float32) @ columns[:, : part.shape[1]].T)
            for part, rows, columns in zip(parts, down, across, strict=True)
        ]
    )
    return pixels.round_().permute(0, 2, 3, 1).to(torch.uint8, memory_format=torch.contiguous_format)


def filter_weights(begin: torch.Tensor, end: torch.Tensor, lengths: Sequence[int], size: int) -> torch.Tensor:
    """Return the weight of each pixel of n lines in each of the `size` pixels to which its [begin, end) is resized.

    The weights form a triangle around the new pixel's centre; if the line shrinks, it is as wide as two new pixels
    (Pillow's `ImagingResample` with the bilinear filter).

    Args:
        begin: float32 (n,), in pixels. If `end` is smaller, the line is mirrored.
        lengths: number of pixels of each line.

    Returns: float32 (n, size, longest); rows add up to 1.
    """
    scale = ((end - begin) / size)[:, None, None]
    centres = begin[:, None, None] + scale * (torch.arange(size, device=begin.device) + 0.5)[:, None]
    places = torch.arange(max(lengths), device=begin.device) + 0.5
    weights = (1 - (places - centres).abs() / scale.abs().clamp(min=1)).clamp(min=0)
    weights *= places < torch.tensor(lengths, device=begin.device)[:, None, None]
    return weights / weights.sum(2, keepdim=True)


def _small_file() -> np.ndarray:
    import simplejpeg

    return np.frombuffer(bytearray(simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))), np.uint8)
