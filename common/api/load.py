"""A trained network as an object, in a notebook or program without a launcher.

import allstep
trained = allstep.load("runs/a")
trained.predict("cat.jpg")    # [("cat", 0.93), ("dog", 0.05), ...]
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import check_model, model_name
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.checkpoint.state import Progress
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.formats.arrays import channels_last, inputs_of, is_tensor, plain
from allstep.common.data.images.crop import centre_box
from allstep.common.data.images.decoding import UnreadableImage, image_content, in_rgb
from allstep.common.data.images.encoded import Reader
from allstep.common.process.lean_import import lean_import
from allstep.common.training.description import Description
from allstep.common.training.metrics import best_classes
from allstep.common.training.trained import Trained, open_trained


class PictureReader:
    """Reads pictures as `encoded.EncodedSplit` reads files in validation."""

    def __init__(self, size: int, *, turns: bool) -> None:
        """`size` and `turns`: see `Reader`."""
        self._reader, self._turns = Reader(size, turns=turns), turns

    def read(self, picture: Any) -> np.ndarray:
        """Return the pixels of a picture (a path, an image of Pillow or an array), uint8 (size, size, 3).

        Raises:
            UserError: `picture` is not a picture, or cannot be read.
        """
        if isinstance(picture, (str, Path)):
            try:
                return self._reader.read(image_content(Path(picture)), centre_box)
            except UnreadableImage as error:
                raise UserError(
                    f"expected an image in {picture}, received what cannot be read as one ({error}); replace it"
                ) from None
        if hasattr(picture, "convert"):
            from PIL import ImageOps

            if (file := getattr(picture, "filename", "")) and getattr(picture, "tile", None):
                return self.read(file)  # Pillow has not decoded it yet, so decode it as training does
            _check_depth(picture)
            return self._resized(in_rgb(ImageOps.exif_transpose(picture) if self._turns else picture))
        return self._resized(_as_rgb(np.asarray(picture)))

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        height, width, _ = pixels.shape
        return np.array(self._reader.resample(pixels, centre_box(width, height)))


def _check_depth(image: Any) -> None:
    if image.mode.startswith(("I", "F")):
        raise UserError(f"expected a picture of 8 bits a channel, received mode {image.mode}; convert it")


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


DEVICES = ("auto", "cpu", "cuda")


def load(
    run: str | Path,
    *,
    checkpoint: str | None = None,
    framework: str | None = None,
    device: str = "auto",
    ema: bool = False,
    model: Any = None,
) -> Loaded:
    """Return a trained network with what its run was trained on.

    Args:
        run: output directory of a run, or a checkpoint.
        checkpoint: latest (default), best, or the name of one.
        framework: pytorch or tensorflow; by default that of the run. The suite's networks load into either.
        device: auto (a GPU if there is one), cpu or cuda.
        ema: whether to take the moving averages of the weights.
        model: for a run whose network is your own: the network, a function that builds it of the shape of a sample and
            the number of classes, or FILE.py:FUNCTION. A run directory is data, whose code is not imported.

    Returns: a `Loaded`.

    Raises:
        UserError: there is no such run, it is damaged, or the network is not known.

    Example::

        trained = allstep.load("runs/a", checkpoint="best")
        for pictures in batches:
            names = [row[0][0] for row in trained.predict(pictures)]
    """
    trained = open_trained(Path(run), checkpoint)
    if framework not in (None, *FRAMEWORKS):
        raise UserError(f"framework must be {' or '.join(FRAMEWORKS)}, got {quote(framework)}")
    if device not in DEVICES:
        raise UserError(f"device must be one of {', '.join(DEVICES)}, got {quote(device)}")
    framework = framework or trained.description.framework
    network, _ = build(trained, framework, device, model, ema=ema)
    return Loaded(trained, framework, network)


def build(trained: Trained, framework: str, device: str, model: Any, *, ema: bool) -> tuple[Any, Progress]:
    """Return a framework's network with the weights of a run, and the progress of the run at these weights.

    Raises UserError as `load` does.
    """
    description = trained.description
    name = _network(description.model, model)
    check_model(name, framework)
    size = {f"model_{key}": value for key, value in description.model_size.items() if key in ("depth", "width")}
    config = dataclasses.replace(TrainConfig(), model=name, model_args=description.model_args, device=device, **size)
    with lean_import():
        module = importlib.import_module(f"allstep.{framework}.loaded")
    own = None if isinstance(model, str) else model
    network = module.LoadedNetwork(config, description.dataset(), own)
    state = trained.weights(network.shapes(), averaged=ema)
    network.load(state.arrays)
    return network, state.progress


def _network(saved: str, given: Any) -> str:
    """Return the name of the network, which is code only if the program names it."""
    if isinstance(given, str):
        return model_name(given)
    if given is not None:
        return user_file.PROGRAM
    if user_file.parse(saved) or saved == user_file.PROGRAM:
        raise UserError(f"the network of the run is your own ({quote(saved)}); pass it again as model")
    return model_name(saved)


class Loaded:
    """A trained network with its classes and preprocessing."""

    def __init__(self, trained: Trained, framework: str, network: Any) -> None:
        """Keep the parts; `load` makes them."""
        self.framework: str = framework
        self._network, self._trained = network, trained
        files = self.description.image_files
        self._reader = PictureReader(files.size, turns=files.exif_orientation) if files else None

    @property
    def model(self) -> Any:
        """The network: a torch.nn.Module in evaluation mode, or a keras.Model."""
        return self._network.model

    @property
    def description(self) -> Description:
        """Samples, preprocessing and network of the run."""
        return self._trained.description

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the outputs; their numbers if they have no names."""
        return tuple(map(self.description.class_name, range(self.description.num_classes)))

    @property
    def config(self) -> Mapping[str, Any]:
        """Flags of the run by name."""
        return self._trained.config

    def preprocess(self, images: Any) -> Any:
        """Return a batch as the network takes it, made exactly as the samples of validation.

        Args:
            images: one picture or a list: paths, images of Pillow or uint8 arrays (height, width, channels); or samples
                as the data set has them, if the run was trained on arrays: one, or a batch. PyTorch's tensors have
                channels first.

        Raises:
            UserError: a picture cannot be read, or samples have another shape or type.
        """
        return self._network.inputs(self.samples(images)[0])

    def predict(self, images: Any, top: int = 5) -> Any:
        """Return names and probabilities of the `top` most probable classes, best first: a list for each picture.

        One picture alone gives its list alone; a run trained on numbers gives its outputs as an array.

        Args:
            images: see `preprocess`.
            top: number of classes.

        Raises:
            UserError: see `preprocess`; or `top` is below 1.
        """
        if top < 1:
            raise UserError(f"top must be 1 or more, got {top}")
        samples, is_one = self.samples(images)
        outputs = self._network.outputs(self._network.inputs(samples))
        if self.description.task == "regression":
            return outputs[0] if is_one else outputs
        if self.description.task == "next-token":
            raise UserError("predict is for classes and numbers, this network predicts each token; call model")
        found = zip(*(array.tolist() for array in best_classes(outputs, top)), strict=True)
        rows = [[(self.description.class_name(one), share) for one, share in zip(*row, strict=True)] for row in found]
        return rows[0] if is_one else rows

    def samples(self, images: Any) -> tuple[np.ndarray, bool]:
        """Return samples (n, ...) before normalisation, and whether a single one was given without a list."""
        images = [self._plain(one) for one in images] if isinstance(images, (list, tuple)) else self._plain(images)
        is_one = _is_picture(images)
        if (isinstance(images, (list, tuple)) and not images) or getattr(images, "size", 1) == 0:
            raise UserError("expected at least one sample, received none; give a picture, or a list of some")
        if self._reader:
            is_one = is_one or (isinstance(images, np.ndarray) and images.ndim < 4)
            pictures: Any = [images] if is_one else images
            return np.stack([self._reader.read(one) for one in pictures]), is_one
        return self._arrays(images, is_one=is_one)

    def _plain(self, value: Any) -> Any:
        """Return tensors as arrays with channels last, and others, such as pictures, as they are."""
        if not is_tensor(value):
            return np.asarray(value) if hasattr(value, "__array__") and not _is_picture(value) else value
        array: Any = plain(value)
        shape = self.description.input_shape
        is_moved = array.ndim > 2 if self._reader else array.shape[-3:] == (*shape[2:], *shape[:2]) != shape
        return channels_last(array, "the pictures") if is_moved else array

    def _arrays(self, images: Any, *, is_one: bool) -> tuple[np.ndarray, bool]:
        description = self.description
        shape, kind = description.input_shape, description.input_type
        if is_one or (isinstance(images, (list, tuple)) and any(_is_picture(one) for one in images)):
            if len(shape) != 3 or kind != "uint8":
                raise UserError(f"expected samples {kind} {shape}, as the run was trained on, received pictures")
            arrays = [_opened(one, shape[2]) for one in ([images] if is_one else images)]
            odd = next((array for array in arrays if array.shape != shape), None)
            values = np.stack(arrays) if odd is None else odd[np.newaxis]
        else:
            values = np.asarray(images)
            is_one = values.shape in (shape, shape[:-1] if shape[-1:] == (1,) else shape)
            values = values[np.newaxis] if is_one else values
        array = inputs_of(values, "the samples")
        if array.shape[1:] != shape or array.dtype != kind:
            raise UserError(
                f"expected samples {kind} {shape}, as the run was trained on, received {array.dtype} {array.shape[1:]}"
            )
        limit = description.num_tokens if kind == "int64" else 0
        if limit and not (0 <= array.min() <= array.max() < limit):
            raise UserError(f"expected tokens from 0 to {limit - 1}, as the run was trained on, received others")
        return array, is_one


def _is_picture(value: Any) -> bool:
    return isinstance(value, (str, Path)) or hasattr(value, "convert")


def _opened(picture: Any, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        image = Image.open(picture) if isinstance(picture, (str, Path)) else picture
        _check_depth(image)
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"expected an image in {picture}, received what cannot be read as one ({error})") from None
    return pixels.reshape(*pixels.shape[:2], channels)
