"""Words that name what exists where they are printed: in a checkout of allstep, or elsewhere."""

import sys
from pathlib import Path


def checkout() -> Path | None:
    """Return the root of the checkout that this allstep runs from, or None if it was installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "Makefile").exists() and (root / "pytorch" / "train.py").exists() else None


def in_checkout() -> bool:
    """Return whether the working folder is the root of the checkout that this allstep runs from."""
    return checkout() == Path.cwd().resolve()


def trainer(framework: str) -> tuple[str, ...]:
    """Return the words that follow `python`, or torchrun and its flags, to start a framework's trainer from here."""
    return (f"{framework}/train.py",) if in_checkout() else ("-m", f"allstep.{framework}.train")


def trainer_command(framework: str) -> str:
    """Return the line that starts a framework's trainer from here in one process."""
    return " ".join(("python", *trainer(framework)))


def with_trainers_here(text: str) -> str:
    """Return a text with lines to type in which the trainers' files are replaced by modules outside a checkout."""
    for framework in () if in_checkout() else ("pytorch", "tensorflow"):
        text = text.replace(f"{framework}/train.py", f"-m allstep.{framework}.train")
    return text


def setup_command(*, gpu: bool = False) -> str:
    """Return the command that builds Horovod for this environment, with NCCL if `gpu` is true."""
    if _is_made_by_setup():
        return "make setup GPU=1" if gpu else "make setup"
    return "allstep horovod install --gpu" if gpu else "allstep horovod install"


def extra_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of allstep."""
    in_setup = extra in ("pytorch", "tensorflow") and _is_made_by_setup()
    return "make setup" if in_setup else f"pip install 'allstep[{extra}]'"


def _is_made_by_setup() -> bool:
    """Return whether this environment is the one of `make setup` in a checkout."""
    root = checkout()
    return root is not None and Path(sys.prefix).resolve() == (root / ".venv").resolve()
