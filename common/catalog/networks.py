"""Table of the networks of both frameworks, readable without importing a framework."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allstep.common.base.checkout import trainer_command
from allstep.common.base.errors import UserError, quote, summary
from allstep.common.base.flag_types import one_of, wrong
from allstep.common.catalog import user_file
from allstep.common.catalog.strategies import TITLES

if TYPE_CHECKING:
    from allstep.common.data.datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Description of a network, which has the same name in both frameworks."""

    module: str
    """Module in pytorch/networks/ and tensorflow/networks/."""
    num_features: int
    """Number of inputs of the last layer, whose outputs are the classes; for wide-resnet, at a width of 1."""
    max_stages: int
    """Maximum number of stages into which `--strategy model-parallel` can cut the network; 1 if it cannot."""
    smallest_image: int = 1
    """Minimum number of pixels on the shorter side of an image; fewer would leave some layer without output."""
    takes_text: bool = False
    """Whether inputs are tokens instead of images."""
    patch_size: int = 1
    """Number of pixels of which both sides of an image must be a multiple."""
    deep: bool = True
    """Whether rounding errors grow so fast that training curves can only be compared over a few steps."""
    benchmark_image: tuple[int, int, int] = (224, 224, 3)
    """Height, width and channels of the images for which the network was designed."""
    benchmark_classes: int = 1000


_MNIST = {"benchmark_image": (28, 28, 1), "benchmark_classes": 10, "deep": False}
_CIFAR = {"benchmark_image": (32, 32, 3), "benchmark_classes": 10}
_CIFAR_RESNET = {"module": "resnet", "num_features": 64, "max_stages": 6, **_CIFAR}

MODELS = {
    "mlp": ModelEntry(module="sequences", num_features=128, max_stages=3, **_MNIST),
    "cnn": ModelEntry(module="sequences", num_features=128, max_stages=4, smallest_image=6, **_MNIST),
    "resnet18": ModelEntry(module="resnet", num_features=512, max_stages=7),
    "resnet50": ModelEntry(module="resnet", num_features=2048, max_stages=7),
    "resnet32": ModelEntry(**_CIFAR_RESNET),
    "resnet44": ModelEntry(**_CIFAR_RESNET),
    "resnet56": ModelEntry(**_CIFAR_RESNET),
    "resnet110": ModelEntry(**_CIFAR_RESNET),
    "wide-resnet": ModelEntry(module="resnet", num_features=64, max_stages=6, **_CIFAR),
    "vgg16": ModelEntry(module="sequences", num_features=4096, max_stages=2, smallest_image=32),
    "vit-tiny": ModelEntry(module="transformers", num_features=192, max_stages=1, patch_size=16),
    "vit-small-images": ModelEntry(
        module="transformers", num_features=64, max_stages=1, patch_size=4,
        benchmark_image=(28, 28, 1), benchmark_classes=10,
    ),
    "text-encoder": ModelEntry(module="transformers", num_features=64, max_stages=1, takes_text=True, deep=False),
    "text-decoder": ModelEntry(module="transformers", num_features=64, max_stages=1, takes_text=True, deep=False),
}  # fmt: skip
"""Networks by their names in `--model`."""
_OTHER = ModelEntry(module="", num_features=0, max_stages=1, **{**_MNIST, "deep": True})
_OF_LIBRARY = ModelEntry(module="", num_features=0, max_stages=1, smallest_image=32)
IMAGE_MODELS = tuple(name for name, entry in MODELS.items() if not entry.takes_text)
LIBRARIES = {"timm": "pytorch", "torchvision": "pytorch", "keras": "tensorflow"}
"""Framework of each library from which `--model LIBRARY:NAME` takes a network."""
WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH = 16, 4


def entry_of(model: str) -> ModelEntry:
    """Return the description of any network; those of libraries and users are only known to take images."""
    return MODELS.get(model) or (_OF_LIBRARY if model.partition(":")[0] in LIBRARIES else _OTHER)


def image_model_name(word: str) -> str:
    """Parse a flag for networks that take images, with the names of `--model`."""
    return one_of(*IMAGE_MODELS)(word) if word in MODELS else model_name(word)


def model_name(word: str) -> str:
    """Parse `--model`: one of MODELS, LIBRARY:NAME or FILE.py:FUNCTION."""
    library, _, name = word.partition(":")
    if (library in LIBRARIES and name) or user_file.parse(word) or word == user_file.PROGRAM:
        return word
    return one_of(*MODELS, "FILE.py:FUNCTION", *(f"{library}:NAME" for library in LIBRARIES))(word)


def check_model(model: str, framework: str) -> None:
    """Refuse a network of the other framework's libraries, naming its trainer, or one in a file that does not exist."""
    library = model.partition(":")[0]
    if model not in MODELS and LIBRARIES.get(library, framework) != framework:
        raise UserError(
            f"expected --model to be a network of {TITLES[framework]}, received {model}, which is one of "
            f"{TITLES[LIBRARIES[library]]}; start {trainer_command(LIBRARIES[library])} for it"
        )
    user_file.check(model, "--model")


def check_frameworks(model: str, frameworks: Sequence[str]) -> None:
    """Refuse to compare frameworks by a network that only one of them has."""
    if len(frameworks) > 1 and not is_in_both(model):
        raise UserError(
            f"expected a network that both frameworks have, received {model}; name one of --frameworks, or have the "
            "file build one for each (docs/models.md)"
        )


def is_in_both(model: str) -> bool:
    """Return whether both frameworks have the network: built-in ones, and files with a function for each framework.

    Both frameworks then start from the canonical weights of `common.recipe.weights`.
    """
    file = user_file.parse(model)
    if file is None:
        return model in MODELS
    return all(user_file.find(file[0], f"{file[1]}_{framework}", "--model") for framework in TITLES)


def unknown_name(model: str, names: Iterable[str]) -> UserError:
    """Return the error for a network that a library does not have."""
    library, _, name = model.partition(":")
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else "see its list of models"
    return UserError(f"expected --model {library}: and a network that {library} has, received {quote(model)}; {advice}")


def cannot_build(model: str, dataset: Dataset, error: Exception) -> UserError:
    """Return the error for a library's network that does not fit the samples."""
    return UserError(
        f"expected a network for samples of shape {dataset.input_shape} from --model {model}, received "
        f"{quote(summary(error))}; choose another network, or other samples"
    )


def max_stages(model: str) -> int:
    """Return `ModelEntry.max_stages`; networks of libraries and users cannot be cut."""
    return MODELS[model].max_stages if model in MODELS else 1


def check_inputs(model: str, dataset: Dataset) -> None:
    """Refuse samples that a network of MODELS does not accept: mlp takes any numbers, others images or texts."""
    tokens = dataset.input_type == "int64"
    if MODELS[model].takes_text:
        expected, fits = "texts to classify", tokens and dataset.task == "classification"
        if model == "text-decoder":
            expected, fits = "texts whose next characters are to be predicted", dataset.task == "next-token"
        advice = "--dataset text-topics with text-encoder, --dataset text with text-decoder"
    else:
        expected, fits = "images", not tokens and len(dataset.input_shape) == 3
        advice = "--model mlp"
        if tokens:
            advice = "--model text-encoder or text-decoder, or convert numbers that are no tokens to fractions"
        if model == "mlp":
            expected, fits = "images or other numbers", not tokens
    if not fits:
        received = f"{dataset.task} of {dataset.input_type} of shape {dataset.input_shape}"
        raise UserError(f"expected {expected} for --model {model}, received a data set for {received}; use {advice}")
    if tokens and not dataset.num_tokens:
        raise UserError(
            f"expected tokens from 0 on, and a data set that says how many there are, for --model {model}, received "
            "negative ones or no number; number them from 0, or give the object num_tokens, a whole number"
        )


def check_image_size(model: str, height: int, width: int) -> None:
    """Refuse images that are too small for the network, or cannot be cut into its patches; say which sizes fit."""
    if model not in MODELS:  # the layers of other networks raise the error
        return
    entry = MODELS[model]
    if min(height, width) < entry.smallest_image:
        minimum = entry.smallest_image
        raise UserError(
            f"expected images of {minimum} x {minimum} pixels or more for --model {model}, received {height} x "
            f"{width}; use mlp"
        )
    if height % entry.patch_size or width % entry.patch_size:
        raise UserError(
            f"expected images whose sides are multiples of {entry.patch_size} pixels for --model {model}, received "
            f"{height} x {width}; use another model"
        )


def build(
    framework: str,
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    depth: int = WIDE_RESNET_DEPTH,
    width: int = WIDE_RESNET_WIDTH,
    num_tokens: int = 0,
) -> Any:
    """Build a network that maps samples to logits (n, num_classes), or (n, length, num_classes) for text-decoder.

    Samples are normalised images, float32 (n, height, width, channels) in TensorFlow and (n, channels, height, width)
    in PyTorch, or texts, int64 (n, length). Raises UserError if the images are too small for the network, or cannot be
    divided into its patches.

    Args:
        name: one of `MODELS`.
        input_shape: (height, width, channels) of an image, (length,) of a text, any shape for mlp.
        depth, width: size of a wide-resnet.
        num_tokens: size of a text's vocabulary.
    """
    if len(input_shape) == 3:
        check_image_size(name, *input_shape[:2])
    # Imported on demand, as are torchvision and timm in it, which take a second.
    module = importlib.import_module(f"allstep.{framework}.networks.{MODELS[name].module}")
    size = {"depth": depth, "width": width} if name == "wide-resnet" else {}
    if MODELS[name].takes_text:
        size = {"num_tokens": num_tokens}
    return module.build(name, input_shape, num_classes, **size)


def check_size(model: str, depth: int, width: int) -> None:
    """Refuse --model-depth and --model-width that the network does not support."""
    if model != "wide-resnet" and (depth, width) != (WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH):
        raise UserError(
            f"expected --model-depth and --model-width with --model wide-resnet, received --model {model}, which comes "
            "in one size; leave them out"
        )
    if model == "wide-resnet" and (depth - 4) % 6:
        raise UserError(
            f"expected --model-depth to be 4 more than a multiple of 6 (10, 16, 22, 28, 40), received {depth}; give "
            "one of these"
        )


def model_argument(word: str) -> str:
    """Parse a word of --model-args: KEY=VALUE."""
    key, sign, _ = word.partition("=")
    if not sign or not key.isidentifier() or not word.isprintable():
        raise wrong("to be KEY=VALUE", word, "as in drop_rate=0.1")
    return word


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments: numbers, tuples, True, False and None as Python writes them, and anything else as text."""
    return {key: _value(text) for key, _, text in (word.partition("=") for word in words)}


def check_model_args(model: str, words: Sequence[str]) -> None:
    """Refuse arguments for a built-in network, and one that is given twice."""
    if words and model in MODELS:
        raise UserError(f"--model-args is for networks of libraries or your own, not for --model {model}; leave it out")
    if len(parsed(words)) < len(words):
        raise UserError(f"--model-args has a key twice in {' '.join(words)}; give each key once")


def network_of_user(
    model: str, framework: str, dataset: Dataset, own: Any, options: Mapping[str, Any], *, kind: type
) -> object:
    """Return the network that a program passes, or that a file holds or builds.

    Raises UserError if the function fails, or there are arguments for a network that is already built.

    Args:
        own: the program's network, or a function that builds it.
        options: arguments of that function besides the shape of a sample and the number of classes.
        kind: class of networks.
    """
    file = user_file.parse(model)
    build = user_file.import_for(framework, *file, "--model") if file else own
    if not isinstance(build, kind):
        return user_file.call(build, dataset.input_shape, dataset.num_classes, flag="--model", **options)
    if options:
        raise UserError(f"--model-args needs a function that builds the network, {model} is one already; leave it out")
    return build


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
