"""Start the observer with a Python process, at little cost: frameworks are hooked once the script imports them."""

import faulthandler
import json
import os
import random
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from allstep.commands.prove.observer import files, importing
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
    settings = Settings(**json.loads(os.environ[VARIABLE]))
    if not _runs(settings.script):
        return
    random.seed(apparent_rank())  # Keras seeds from it: rank 0 gets the weights of one rank, unless the script seeds
    folder = Path(settings.folder)
    faulthandler.register(STACKS, file=open(folder / f"{os.getpid()}.stacks", "w"), all_threads=True)  # noqa: SIM115
    observer = Observer(settings)
    files.install(observer)
    importing.install(observer)


def _runs(script: str) -> bool:
    """Return whether this process runs the script, or was started by its torch.multiprocessing.spawn."""
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    return words[:1] == [script] or any(word.startswith("from multiprocessing.spawn import") for word in words)
