"""Packages that only some commands and strategies need: which one is missing, and the command that installs it."""

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

from allstep.common.base.checkout import extra_command, setup_command
from allstep.common.base.errors import UserError

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "timm"), "pytorch"),
    **dict.fromkeys(("tensorflow", "keras"), "tensorflow"),
    **dict.fromkeys(("pyarrow", "google_crc32c"), "data"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript", "tf2onnx"), "onnx"),
    "mlflow": "mlflow",
    "wandb": "wandb",
}
"""Extra of allstep that installs a package, by its import name."""
_LAUNCHERS = {"torchrun": "torch", "horovodrun": "horovod", "mpirun": "horovod"}
"""Package with which a launcher comes."""
FRAMEWORK_PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow"}


def missing(*packages: str, by: str = "") -> str | None:
    """Return the line about the first of the packages that is not installed; None if all are."""
    package = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    return _line(package, by) if package else None


def need(packages: Iterable[str], *, by: str = "") -> None:
    """Refuse an environment without one of the packages, with the command that installs it; `by` is what needs them."""
    if line := missing(*packages, by=by):
        raise UserError(line)


def need_frameworks(frameworks: Iterable[str], *, horovod: bool = False, by: str = "") -> None:
    """Refuse an environment without one of the frameworks, or without Horovod if `horovod` is true.

    The message has the command that installs what is missing.
    """
    need([FRAMEWORK_PACKAGES[name] for name in frameworks], by=by)
    if horovod:
        need(["horovod"], by=by)


def imported(module: str) -> ModuleType:
    """Import a module.

    Raises ImportError, with the command that installs it, if a package that allstep can install is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if line := missing_part(error):
            raise ImportError(line) from None
        raise


def missing_part(error: BaseException) -> str | None:
    """Return the line about a missing package or launcher if it is the cause of `error`, else None."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        known = package == "horovod" or package in EXTRAS
        return _line(package, "") if known and importlib.util.find_spec(package) is None else None
    if isinstance(error, FileNotFoundError) and error.filename in _LAUNCHERS:
        return f"expected {error.filename} on the PATH, received none; run {_command(_LAUNCHERS[error.filename])}"
    return None


def _line(package: str, by: str) -> str:
    main = FRAMEWORK_PACKAGES.get(EXTRAS.get(package, ""), package)
    if importlib.util.find_spec(main) is None:  # the framework itself, whose parts are imported first
        package = main
    return f"expected {package}{by and f' for {by}'}, received an environment without it; run {_command(package)}"


def _command(package: str) -> str:
    """Return the command that installs a package."""
    return setup_command() if package == "horovod" else extra_command(EXTRAS[package])
