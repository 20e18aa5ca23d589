"""Observe torch.save, which opens its file in C++, where Python raises no audit event."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import torch

from allstep.commands.prove.observer.files import note_write
from allstep.commands.prove.observer.observer import Observer, replace


def install(observer: Observer) -> None:
    """Hook torch.save."""
    seen: set[str] = set()

    def observe(_obj: Any, f: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        if isinstance(f, (str, os.PathLike)):
            note_write(observer, f, seen)
        yield

    replace(torch, "save", observer.around("files written by torch.save", observe))
