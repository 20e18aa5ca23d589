"""Start of ranks from a Python program or a notebook, which returns a function's result on each, like `horovod.run`.

    import allstep
    results = allstep.launch(train, 0.1, num_ranks=4)

The function is sent to the ranks by cloudpickle, through a file that only this user can read. Results are never
unpickled: numbers, strings, lists, tuples, mappings and arrays come back as JSON and .npy files.
"""

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
from allstep.common.process.requirements import need

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "horovodrun": ("horovodrun", "-np", "{ranks}", sys.executable),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "{ranks}", "--no-python", sys.executable),
}
"""Command of each launcher, which the arguments of Python follow."""
_FUNCTION = "function.pickle"
_GRACE_SECONDS = 10.0


def launch(function: Callable[..., Any], *arguments: Any, num_ranks: int, launcher: str = "horovodrun") -> list[Any]:
    """Call a function on ranks of this host, and return the result of each, in the order of ranks.

    Args:
        function: any function, also of a notebook; it must import what it needs, and trains by a `Session` or a loop.
        arguments: arguments of the function.
        num_ranks: number of processes to start.
        launcher: horovodrun, or torchrun for the strategies of torch.distributed.

    Raises:
        UserError: `num_ranks` is out of range, or the launcher is unknown or not installed.
        Fault: a rank failed, or its result has an unsupported type; the rank has printed the error.
    """
    import cloudpickle

    if not 1 <= num_ranks <= max_local_ranks():
        raise UserError(f"expected num_ranks from 1 to {max_local_ranks()}, received {num_ranks}; start fewer or more")
    if launcher not in LAUNCHERS:
        raise UserError(f"expected launcher to be {' or '.join(LAUNCHERS)}, received {quote(launcher)}; name one")
    need(["torch" if launcher == "torchrun" else "horovod"], by=f"allstep.launch by {launcher}")
    with tempfile.TemporaryDirectory(prefix="allstep-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(cloudpickle.dumps((function, arguments)))
        command = [word.format(ranks=num_ranks) for word in LAUNCHERS[launcher]]
        status = _run([*command, "-m", __name__, name])
        results = [folder / str(rank) for rank in range(num_ranks)]
        if status or not all(result.exists() for result in results):  # a rank may have called sys.exit()
            raise Fault(f"expected all {num_ranks} ranks to return, received exit status {status} from {launcher}")
        return [array_json.load(result) for result in results]


def _run(command: list[str]) -> int:
    """Run a command and return its exit status; end the command if this program is interrupted."""
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
    """Call the function as a rank, and save its result."""
    from allstep.common.launch.placement import find_placement

    # `launch` has written the file, to a folder that no other user can write to.
    function, arguments = pickle.loads((folder / _FUNCTION).read_bytes())
    array_json.save(folder / str(find_placement().rank), function(*arguments))


if __name__ == "__main__":
    from allstep.common.process.exit import run_rank

    run_rank(lambda: _call(Path(sys.argv[1])))
