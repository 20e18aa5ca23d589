"""Users' programs on real ranks: a Session, `allstep.launch`, and tools for custom training loops.

docs/python.md quotes the examples in examples/, which tests/launch/test_pages.py runs.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from ranks import BIN, REPOSITORY, full, launch, run
from requirements import need_packages
from sklearn.datasets import load_digits

from allstep.common.api import checkpoint
from allstep.common.data.sharding import sample_order

SESSION = """
import json, sys
import numpy as np
import allstep

def train(framework, **flags):
    from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    weights = np.random.default_rng(0).normal(scale=0.1, size=(64, 10)).astype(np.float32)
    if framework == "pytorch":
        import torch
        from allstep.pytorch import Session
        model = torch.nn.Linear(64, 10, bias=False)
        model.weight.data = torch.from_numpy(weights.T.copy())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    else:
        import keras
        from allstep.tensorflow import Session
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, use_bias=False)])
        model.set_weights([weights])
        optimizer = keras.optimizers.SGD(0.1)
    session = Session(model, (x[:1500], y[:1500]), (x[1500:], y[1500:]), optimizer=optimizer, epochs=2,
                      global_batch_size=64, **flags)
    return [epoch["validation_loss"] for epoch in session.fit()]

def by_hand():
    # Softmax regression by gradient descent in NumPy, in the order that `sharding` documents.
    from sklearn.datasets import load_digits
    from allstep.common.data.sharding import sample_order
    x, y = load_digits(return_X_y=True)
    x, eye = x / 16, np.eye(10)
    w = np.random.default_rng(0).normal(scale=0.1, size=(64, 10)).astype(np.float32).astype(float)
    def softmax(z):
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)
    losses = []
    for epoch in range(2):
        order = sample_order(np.arange(1500), 1500, seed=0, epoch=epoch)
        for begin in range(0, 1500, 64):
            i = order[begin : begin + 64]
            w -= 0.1 * x[i].T @ (softmax(x[i] @ w) - eye[y[i]]) / len(i)
        losses.append(float(-np.log(softmax(x[1500:] @ w)[np.arange(297), y[1500:]]).mean()))
    return losses

if __name__ == "__main__":
    expected = by_hand()
    for arguments in json.loads(sys.argv[1]):
        launcher = arguments.pop("launcher")
        if launcher:
            found = allstep.launch(lambda: train(**arguments), num_ranks=2, launcher=launcher)
        else:
            found = [train(**arguments)]
        for losses in found:
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
        print("as by hand:", len(found))
"""


@pytest.mark.parametrize(
    "runs",
    [
        [
            {"framework": "pytorch", "launcher": None},
            {"framework": "pytorch", "launcher": "torchrun", "strategy": "ddp"},
        ],
        [{"framework": "tensorflow", "launcher": "horovodrun"}],
        full([{"framework": "pytorch", "launcher": "horovodrun"}]),
        full([{"framework": "tensorflow", "launcher": None}]),
    ],
    ids=lambda runs: "-".join(str(run["launcher"]) for run in runs),
)  # fmt: skip
def test_a_session_trains_as_by_hand_on_any_number_of_ranks(runs, tmp_path):
    (tmp_path / "mine.py").write_text(SESSION)
    result = run(sys.executable, tmp_path / "mine.py", json.dumps(runs))
    assert result.returncode == 0, result.output
    assert re.findall(r"as by hand: (\d)", result.stdout) == ["1" if one["launcher"] is None else "2" for one in runs]


LOOP = REPOSITORY / "examples" / "own_loop_horovod.py"


def test_a_loop_by_hand_goes_on_at_the_sample_on_other_ranks(tmp_path):
    """Oracle: the uninterrupted run on one rank, whose weights have the same sum."""
    undisturbed = launch("alone", 1, LOOP, tmp_path / "a")
    assert undisturbed.returncode == 0, undisturbed.output
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "step-00000060").rename(tmp_path / "b" / "step-00000060")
    resumed = launch("horovodrun-gloo", 2, LOOP, tmp_path / "b")
    assert resumed.returncode == 0, resumed.output
    [expected], [found] = (re.findall(r"87 steps, .* to (\S+)", result.stdout) for result in (undisturbed, resumed))
    assert float(found) == pytest.approx(float(expected), abs=1e-4)


# As with "nccl", there is no backend for CPU tensors.
ON_GPUS_ALONE = """
import sys
import torch
import torch.distributed as dist
from allstep.common.base.errors import Fault
from allstep.pytorch import check_replicas, watch
dist.init_process_group("cuda:gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
with watch() as steps:
    steps.begin(1)
    check_replicas(model)
    model.weight.data += dist.get_rank()
    try:
        check_replicas(model)
    except Fault as error:
        sys.stdout.write(f"found: {error}\\n")  # in one piece, since ranks share the pipe
"""


def test_parts_beside_a_process_group_that_is_for_gpus_alone(tmp_path):
    (tmp_path / "mine.py").write_text(ON_GPUS_ALONE)
    result = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", tmp_path / "mine.py")
    assert result.returncode == 0, result.output
    assert len(re.findall("found: .*weight", result.stdout)) == 2, result.output


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_a_loop_of_a_library_ends_at_the_same_weights(library, tmp_path):
    """Oracle: a loop in NumPy, in the order of `shard`, with steps by the mean loss of the global batch."""
    need_packages(library)
    script = REPOSITORY / "examples" / f"own_loop_{library}.py"
    result = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.output
    [found] = re.findall(r"87 steps, weights add up to (\S+)", result.stdout)
    step, state = checkpoint.load(tmp_path)
    [weights] = [array for name, array in state["model"].items() if name.endswith("weight")]
    assert step == 87 and weights.sum(dtype=float) == pytest.approx(float(found), abs=1e-5)
    np.testing.assert_allclose(weights, softmax_regression(), atol=1e-5)


def softmax_regression() -> np.ndarray:
    """Train three epochs in NumPy from torch's initial weights of a Linear(64, 10), and return (10, 64) weights."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 10)
    w, b = layer.weight.detach().numpy().astype(float), layer.bias.detach().numpy().astype(float)
    x, y = load_digits(return_X_y=True)
    x = x / 16
    for epoch in range(3):
        order = sample_order(np.arange(len(x)), len(x), seed=0, epoch=epoch)
        for begin in range(0, len(x), 64):
            i = order[begin : begin + 64]
            odds = np.exp(x[i] @ w.T + b)
            error = odds / odds.sum(1, keepdims=True) - np.eye(10)[y[i]]
            w -= 0.1 * error.T @ x[i] / len(i)
            b -= 0.1 * error.mean(0)
    return w


STUCK = """
import sys, time
import horovod.torch as hvd
import torch
from allstep.pytorch import check_replicas, watch
hvd.init()
model = torch.nn.Linear(2, 1)
with watch(stall_timeout=2) as steps:
    for step in range(1, 1000):
        steps.begin(step)
        if sys.argv[1] == "apart":
            check_replicas(model, f"after step {step}")
        if sys.argv[1] == "stuck" and hvd.rank() == 1 and step == 5:
            time.sleep(100)
        hvd.allreduce(torch.zeros(1))
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [("stuck", r"rank 1 .*step 5"), ("apart", r"out of step after step 1: the weights of rank 1 .* first in weight")],
)  # fmt: skip
def test_a_watched_loop_ends_with_a_report(what, said, tmp_path):
    (tmp_path / "mine.py").write_text(STUCK)
    result = launch("horovodrun-gloo", 2, tmp_path / "mine.py", what)
    assert result.returncode == 1, result.output
    assert re.search(said, result.output), result.output


LATE = """
import tensorflow as tf
tf.constant(1)
from allstep.tensorflow import Session
import keras
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
Session(model, ([[1.0], [2.0], [3.0], [4.0]], [0, 1, 1, 0]), epochs=1).fit()
"""


def test_a_session_after_tensorflow_has_started(tmp_path):
    (tmp_path / "mine.py").write_text(LATE)
    refused = launch("horovodrun-gloo", 2, tmp_path / "mine.py")
    assert refused.returncode == 2, refused.output
    assert refused.output.count("import Session first") == 1
    assert "Traceback" not in refused.output
    alone = launch("alone", 1, tmp_path / "mine.py")  # whose cores no other rank needs
    assert alone.returncode == 0, alone.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch": 2}, "expected a flag .* received --epoch; did you mean --epochs?"),
        ({"train": ([[1.0], [1.0, 2.0]], [0, 1])}, "of one shape for all samples"),
        ({"train": ([[1.0], [float("nan")]], [0, 1])}, "received nan in sample 1"),
        ({"train": ([], [])}, "at least 1 sample"),
        (
            {"train": 3},
            "to be inputs and targets, a map-style data set, or an object with __len__ and read.* received int",
        ),
        ({"elastic": True}, "expected a job of a fixed number of ranks for a Session, received elastic=True"),
        ({"optimizer": "sdg"}, "--optimizer to be one of"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), "weight_decay": 0.1},
            "weight_decay has no effect on an optimizer that is given",
        ),
        (
            {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)},
            "the optimizer has parameters that are not the model's",
        ),
        ({"optimizer": "program"}, "--optimizer program needs a Session that is given an optimizer"),
        ({"outputs": 1}, r"expected outputs \(n, 2\) of --model program, received \(n, 1\)"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(change, said):
    _refused(change, said)


def test_an_autocast_around_a_session():
    with torch.autocast("cpu", torch.bfloat16):
        _refused({}, "no autocast around training, .* cpu; give --precision bf16")


def test_a_default_device_without_values():
    from allstep.common.base.errors import UserError
    from allstep.pytorch.numerics import check_settings

    with torch.device("meta"), pytest.raises(UserError, match="received meta as the default device of torch; leave"):
        check_settings(torch.device("cpu"))


def _refused(change, said):
    from allstep.common.base.errors import UserError
    from allstep.pytorch import Session

    arguments = {"train": ([[1.0], [2.0], [3.0], [4.0]], [0, 1, 1, 0]), "outputs": 2, **change}
    model = torch.nn.Linear(1, arguments.pop("outputs"))
    with pytest.raises(UserError, match=said) as error:
        Session(model, arguments.pop("train"), **{"epochs": 1, **arguments}).fit()
    assert "\n" not in str(error.value)
