"""Runs must not unpickle data that they read or receive, and must not print secrets.

Oracle: the syntax trees of the sources; planted secrets, searched for in all output and files of runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from ranks import REPOSITORY, launch

# These unpickle data, or execute it.
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FUNCTIONS = {"torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "eval", "exec", "os.system", "os.popen"}
# Horovod and torch.distributed pickle the objects that these methods send.
METHODS = {
    *("broadcast_object", "allgather_object", "broadcast_object_fn", "broadcast_optimizer_state"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
}
KEYWORDS = {"allow_pickle", "shell"}
# It unpickles a user's function that a program of the same user has just written for its ranks.
UNPICKLES = {REPOSITORY / "common" / "api" / "launch.py"}


def unsafe(source: str) -> Iterator[str]:
    """Yield the parts of a program that could execute code from data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_safe = name == "torch.load" and any(one.arg == "weights_only" for one in node.keywords)
            if (name in FUNCTIONS and not is_safe) or name.rsplit(".", 1)[-1] in METHODS:
                yield name
            yield from (one.arg for one in node.keywords if one.arg in KEYWORDS and ast.unparse(one.value) != "False")
            yield from (
                one.arg for one in node.keywords if one.arg == "weights_only" and ast.unparse(one.value) != "True"
            )


@pytest.mark.parametrize(
    "folder", ["common", "pytorch", "tensorflow", "commands", "interface", "benchmarks", "examples", "tools"]
)
def test_nothing_is_unpickled(folder):
    paths = sorted({*(REPOSITORY / folder).rglob("*.py")} - UNPICKLES)
    assert paths
    assert {str(path): found for path in paths if (found := list(unsafe(path.read_text())))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "hvd.broadcast_object(state)",
        "dist.all_gather_object(objects, mine)",
        "subprocess.run(line, shell=True)",
        "eval(text)",
    ],
)
def test_the_search_finds(source):
    assert list(unsafe(source))


SECRET = "pl4nted-53cret"
MIRROR = f"http://user:{SECRET}@127.0.0.1:9/{{}}?token={SECRET}"  # no server listens on this port
FAILING = """
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.pytorch import train
class Fails(Hook):
    def on_step(self, session):
        raise OSError("lost the disk")
run_rank(lambda: train.main(hooks=[Fails()]))
"""


def printed(tmp_path, command: list, *, status: int) -> bytes:
    """Run a command with secrets in its environment and flags, and return all its output and files."""
    output = tmp_path / "run"
    flags = ("--mirror", MIRROR, "--output-dir", output, "--epochs", "1", "--tensorboard")
    result = launch("horovodrun-gloo", 2, *command, *flags, AWS_SECRET_ACCESS_KEY=SECRET)
    assert result.returncode == status, result.output
    written = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert status or len(written) >= 5  # config.yaml, metrics.jsonl, three of a checkpoint, TensorBoard's
    return b"\n".join([result.output.encode(), *written])


def test_secrets_are_not_told(tmp_path):
    assert SECRET.encode() not in printed(tmp_path, ["pytorch/train.py"], status=0)


def test_secrets_are_not_told_where_a_download_fails(tmp_path):
    data = ("--dataset", "mnist", "--data-dir", tmp_path / "data")
    text = printed(tmp_path, ["pytorch/train.py", *data], status=2)
    assert b"http://127.0.0.1:9/" in text and SECRET.encode() not in text


def test_secrets_are_not_told_where_a_rank_raises(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    text = printed(tmp_path, [script], status=1)
    assert b"lost the disk" in text and SECRET.encode() not in text
