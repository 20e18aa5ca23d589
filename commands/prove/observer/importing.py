"""Hook each library right after it was imported, before the script can use it."""

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
# Modules of this package whose `install` hooks a library, by library.
_OBSERVERS = {
    "torch": f"{_HERE}.pytorch",
    "horovod.torch": f"{_HERE}.horovod_pytorch",
    "tensorflow": f"{_HERE}.tf_distribute",
    "keras": f"{_HERE}.keras",
    "horovod.tensorflow": f"{_HERE}.horovod_tensorflow",
}


def install(observer: Observer) -> None:
    """Hook the libraries that this process will import."""

    def hook_of(name: str) -> Callable[[Any], None]:
        return lambda _: importlib.import_module(_OBSERVERS[name]).install(observer)

    hook_modules(observer, {name: hook_of(name) for name in _OBSERVERS})


def hook_modules(observer: Observer, hooks: dict[str, Callable[[Any], None]]) -> None:
    """Hook modules by these functions, at once or when they are imported."""
    for name, hook in list(hooks.items()):
        hooks[name] = observer.quiet(name, hook)
        if name in sys.modules:
            hooks[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder(hooks))


class _Finder(MetaPathFinder):
    """Finds the libraries as Python does, but loads them by `_Loader`."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._hooks:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self._hooks[name])
        return spec


class _Loader(Loader):
    """Loads a module by another loader, and then calls a function."""

    def __init__(self, loader: Any, loaded: Callable[[Any], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later requests to the module's loader (resources, sources) must reach the real one.
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded(module)
