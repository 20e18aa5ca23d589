"""Hooks a library right after the script has imported it, before the script has anything of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from allstep.commands.prove.observer.observer import Observer

_HERE = __package__
# By library, the module here whose `install` hooks it.
_OBSERVERS = {
    "torch": f"{_HERE}.pytorch",
    "horovod.torch": f"{_HERE}.horovod_pytorch",
    "tensorflow": f"{_HERE}.tf_distribute",
    "keras": f"{_HERE}.keras",
    "horovod.tensorflow": f"{_HERE}.horovod_tensorflow",
}


def install(observer: Observer) -> None:
    """Hook the libraries that this process will import."""

    def hook(name: str) -> None:
        importlib.import_module(_OBSERVERS[name]).install(observer)

    sys.meta_path.insert(0, _Finder(hook))


class _Finder(MetaPathFinder):
    """Finds the libraries as Python does, and has them loaded by `_Loader`."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        self._hook = hook

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _OBSERVERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, lambda: self._hook(name))
        return spec


class _Loader(Loader):
    """Loads a module as another loader does, and calls a function then."""

    def __init__(self, loader: Any, loaded: Callable[[], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What the module and others ask of its loader (resources, sources) is for the real one to answer.
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded()
