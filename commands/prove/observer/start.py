"""Start the observer with a Python process, at little cost: frameworks are hooked once the script imports them."""

import faulthandler
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from allstep.commands.prove.observer.observer import Observer, Settings
from allstep.common.launch.placement import apparent_rank

VARIABLE = "ALLSTEP_PROVE"
"""The environment variable that holds `Settings` as JSON."""
STACKS = signal.SIGUSR1
"""The signal upon which a rank writes the stacks of its threads into its folder."""


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables by which every Python process that runs the script observes it."""
    room = str(Path(__file__).parents[1] / "on_path")
    path = os.environ.get("PYTHONPATH")
    return {VARIABLE: json.dumps(asdict(settings)), "PYTHONPATH": f"{room}{os.pathsep}{path}" if path else room}


def start() -> None:
    """Observe this process if it runs the script; launchers are Python processes, too."""
    from allstep.commands.prove.observer import files  # it hooks modules by this one

    settings = Settings(**json.loads(os.environ[VARIABLE]))
    if not _runs(settings.script):
        return
    random.seed(apparent_rank())  # Keras seeds from it: rank 0 gets the weights of one rank, unless the script seeds
    folder = Path(settings.folder)
    faulthandler.register(STACKS, file=open(folder / f"{os.getpid()}.stacks", "w"), all_threads=True)  # noqa: SIM115
    observer = Observer(settings)
    files.install(observer)
    hook_libraries(observer)


def _runs(script: str) -> bool:
    """Return whether this process runs the script, or was started by its torch.multiprocessing.spawn."""
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    return words[:1] == [script] or any(word.startswith("from multiprocessing.spawn import") for word in words)


_HERE = __package__
# Modules of this package whose `install` hooks a library, by library.
_OBSERVERS = {
    "torch": ("pytorch",),
    "horovod.torch": ("horovod_pytorch",),
    "tensorflow": ("tf_distribute",),
    "keras": ("keras_models", "keras_gradients", "keras_fit"),
    "horovod.tensorflow": ("horovod_tensorflow",),
}


def hook_libraries(observer: Observer) -> None:
    """Hook each library right after it was imported, before the script can use it."""

    def hook_of(name: str) -> Callable[[Any], None]:
        def hook(library: Any) -> None:
            if name == "keras" and library.backend.backend() != "tensorflow":
                return
            for observers in _OBSERVERS[name]:
                importlib.import_module(f"{_HERE}.{observers}").install(observer)

        return hook

    def leave_uncompiled(dynamo: Any) -> None:
        """Run what torch.compile is given as it is, even with fullgraph: a compiled optimizer's step calls no hooks."""
        dynamo.set_stance("force_eager")

    def hook_drop_in(optimizers: Any) -> None:
        importlib.import_module(f"{_HERE}.horovod_tensorflow").install_optimizer(observer, optimizers)

    others = {"torch._dynamo": leave_uncompiled, "allstep.tensorflow.drop_in.optimizer": hook_drop_in}
    hook_modules(observer, {name: hook_of(name) for name in _OBSERVERS} | others)


def hook_modules(observer: Observer, hooks: dict[str, Callable[[Any], None]]) -> None:
    """Hook modules by these functions, at once or when they are imported."""
    for name, hook in list(hooks.items()):
        hooks[name] = observer.quiet(name, hook)
        if name in sys.modules:
            hooks[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder(hooks))


class _Finder(MetaPathFinder):
    """Finds the libraries as Python does, and hooks each once it is loaded."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._hooks:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_hook(module: ModuleType) -> None:
                load(module)
                self._hooks[name](module)

            vars(spec.loader)["exec_module"] = load_and_hook
        return spec
