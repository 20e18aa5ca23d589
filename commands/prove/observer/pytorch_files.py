"""Observes torch.save, which opens its file in no code of Python's."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from allstep.commands.prove.observer.files import note_write
from allstep.commands.prove.observer.observer import Observer, replace


def install(observer: Observer) -> None:
    """Hook torch.save."""
    seen: set[str] = set()

    def wrap(save: Any) -> Any:
        @functools.wraps(save)
        def observed(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                note_write(observer, f, seen)
            save(obj, f, *args, **kwargs)

        return observed

    replace(torch, "save", wrap)
