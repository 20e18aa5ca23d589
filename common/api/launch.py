"""Ranks started from a Python program or a notebook, as `horovod.run` does, and what a function returns on each.

    import allstep
    results = allstep.launch(train, 0.1, num_ranks=4)

The function travels to the ranks as cloudpickle has it, through a file that only this user can read. What comes back is
never unpickled: numbers, texts, lists, mappings and arrays travel as JSON and .npy files.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allstep.common.base.errors import Fault, UserError, quote
from allstep.common.base.flag_types import max_local_ranks
from allstep.common.files import array_json

LAUNCHERS = {
    "horovodrun": ("horovodrun", "-np", "{ranks}", sys.executable),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "{ranks}", "--no-python", sys.executable),
}
"""The command of each launcher, after which the arguments of Python follow."""
_FUNCTION = "function.pickle"
_GRACE_SECONDS = 10.0


def launch(function: Callable[..., Any], *arguments: Any, num_ranks: int, launcher: str = "horovodrun") -> list[Any]:
    """Call a function on ranks of this host, and return what it returns on each, in their order.

    Args:
        function: any, also of a notebook; it imports what it needs, and trains by a `Session` or a loop of its own.
        arguments: of the function.
        num_ranks: processes to start.
        launcher: horovodrun, or torchrun for the strategies of torch.distributed.

    Raises:
        UserError: there are no ranks to start, or no such launcher.
        Fault: a rank failed, or has returned what JSON does not have; it has said so on standard error.
    """
    import cloudpickle

    if not 1 <= num_ranks <= max_local_ranks():
        raise UserError(f"expected num_ranks from 1 to {max_local_ranks()}, received {num_ranks}; start fewer or more")
    if launcher not in LAUNCHERS:
        raise UserError(f"expected launcher to be {' or '.join(LAUNCHERS)}, received {quote(launcher)}; name one")
    with tempfile.TemporaryDirectory(prefix="allstep-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(cloudpickle.dumps((function, arguments)))
        command = [word.format(ranks=num_ranks) for word in LAUNCHERS[launcher]]
        status = _run([*command, "-m", __name__, name])
        if status:
            raise Fault(f"expected all {num_ranks} ranks to return, received exit status {status} from {launcher}")
        return [array_json.load(folder / str(rank)) for rank in range(num_ranks)]


def _run(command: list[str]) -> int:
    """The exit status of a command that has an end together with this program."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen(command, env=environ)
    try:
        return process.wait()
    except BaseException:  # such as an interrupt
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _call(folder: Path) -> None:
    """A rank: call the function, and leave what it returns."""
    from allstep.common.launch.placement import find_placement

    # Our own caller has written it, in a folder that nobody else can write to.
    function, arguments = pickle.loads((folder / _FUNCTION).read_bytes())
    array_json.save(folder / str(find_placement().rank), function(*arguments))


if __name__ == "__main__":
    from allstep.common.process.exit import run_rank

    run_rank(lambda: _call(Path(sys.argv[1])))
