"""Packages that only some commands and strategies need: the line that says which one is missing and how to get it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from allstep.common.base.checkout import extra_command, setup_command
from allstep.common.base.errors import UserError

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "timm"), "pytorch"),
    **dict.fromkeys(("tensorflow", "keras"), "tensorflow"),
    **dict.fromkeys(("pyarrow", "google_crc32c"), "data"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "mlflow": "mlflow",
    "wandb": "wandb",
}
"""Extra of allstep that installs a package, by its import name."""
FRAMEWORK_PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow"}


def need(packages: Iterable[str], *, by: str = "") -> None:
    """Refuse an environment without one of the packages.

    Args:
        by: what needs them, for the message.

    Raises:
        UserError: one is missing; the message has the command that installs it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(_line(package, by))


def need_frameworks(frameworks: Iterable[str], *, horovod: bool = False, by: str = "") -> None:
    """Refuse an environment without one of the frameworks, or without Horovod if `horovod` is true.

    Raises:
        UserError: one is missing; the message has the command that installs it.
    """
    need([FRAMEWORK_PACKAGES[name] for name in frameworks], by=by)
    if horovod:
        need(["horovod"], by=by)


def missing_package(error: ImportError) -> str | None:
    """Return the line about a package of ours that is not installed, if that is why an import failed."""
    package = (error.name or "").partition(".")[0]
    known = package == "horovod" or package in EXTRAS
    return _line(package, "") if known and importlib.util.find_spec(package) is None else None


def _line(package: str, by: str) -> str:
    command = setup_command() if package == "horovod" else extra_command(EXTRAS[package])
    return f"expected {package}{by and f' for {by}'}, received an environment without it; run {command}"
