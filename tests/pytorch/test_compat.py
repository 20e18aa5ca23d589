"""Internals of PyTorch and Horovod behave as `pytorch/compat.py` expects. Oracle: the libraries themselves."""

from __future__ import annotations

import contextlib
import sys
import warnings

import pytest
import torch
from ranks import REPOSITORY, launch, run
from torch.distributed.pipelining import PipelineStage

from allstep.common.base.errors import UserError
from allstep.pytorch import compat
from allstep.pytorch.compat import (
    BatchNorm,
    all_gather,
    is_transforming,
    known_arguments,
    set_max_programs,
    takes_cpu_tensors,
    unscale,
    without_compiler,
)
from allstep.pytorch.optimizers.layerwise import Lamb, Lars, NovoGrad
from allstep.pytorch.strategies.model_parallel import ModelParallel

pytestmark = pytest.mark.cold

OPTIMIZERS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(Lars, Lamb, NovoGrad),
]


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d])
def test_batch_norms_have_one_base(kind):
    assert isinstance(kind(3), BatchNorm)
    assert not isinstance(torch.nn.LayerNorm(3), BatchNorm)


def test_a_transform_is_seen():
    seen = []
    torch.vmap(lambda number: seen.append(is_transforming()) or number)(torch.ones(2))
    assert seen == [True] and not is_transforming()


@pytest.mark.parametrize("number", [3, 12])
def test_most_programs(number):
    torch._dynamo.reset()  # recompilations are counted per function
    sizes: list[int] = []
    compiled = torch.compile(lambda values: values + 1, dynamic=False, backend=Noting(sizes))
    with torch._dynamo.config.patch(recompile_limit=8):
        set_max_programs(number)
        for size in range(2, 12):
            assert compiled(torch.ones(size)).tolist() == [2] * size
    assert sizes == list(range(2, 2 + min(number, 10)))


class Noting:
    """Compiler backend that records the size of the input and returns the code unchanged."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __call__(self, graph, inputs):
        self._sizes.append(len(inputs[0]))
        return graph.forward


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_without_compiler_does_what_torch_s_does(kind):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight, make in zip(weights, (kind, without_compiler(kind)), strict=True):
        optimizer = make([weight], lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert weights[0].tolist() == weights[1].tolist() != [1, 1, 1]


def test_multi_tensor_operations_do_what_those_of_one_tensor_do():
    """Oracle: torch's operators."""
    tensors, others = [torch.arange(6.0).view(2, 3), torch.ones(4)], [torch.full((2, 3), 3.0), torch.arange(4.0)]
    assert compat.norms_of(tensors).tolist() == pytest.approx([55**0.5, 2.0])
    made = compat.scaled(tensors, 2.0)
    assert all(torch.equal(one, 2 * tensor) for one, tensor in zip(made, tensors, strict=True))
    compat.scale(made, [torch.tensor(3.0), torch.tensor(0.5)])
    assert torch.equal(made[0], 6 * tensors[0]) and torch.equal(made[1], tensors[1])
    compat.scale(made, torch.tensor(2.0))
    assert torch.equal(made[0], 12 * tensors[0]) and torch.equal(made[1], 2 * tensors[1])
    compat.add(made, others, factor=-1.0)
    assert torch.equal(made[1], 2 * tensors[1] - others[1])
    compat.move_towards(made, others, 0.5)
    assert torch.equal(made[1], (2 * tensors[1] - others[1] + others[1]) / 2)


PROGRAM = """
import sys, torch
from allstep.pytorch.compat import without_compiler
from allstep.pytorch.optimizers.layerwise import Lamb
from allstep.pytorch.optimizers.layerwise import Lars
weight = torch.nn.Parameter(torch.ones(3))
optimizer = {make}([weight], lr=0.1)
weight.grad = torch.ones(3)
optimizer.zero_grad(), optimizer.step(), optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("make", "imports"),
    [
        *(("torch.optim.SGD", "True"), ("without_compiler(torch.optim.SGD)", "False")),
        *(("without_compiler(Lars)", "False"), ("without_compiler(Lamb)", "False")),
    ],
)
def test_only_torch_s_own_imports_the_compiler(make, imports):
    """If torch's optimizers no longer import it, `without_compiler` can be removed."""
    assert run(sys.executable, "-c", PROGRAM.format(make=make)).stdout.strip() == imports


def test_horovod_s_handles_and_gloo_s_threads(tmp_path):
    program = REPOSITORY / "tests/pytorch/ranks/insides.py"
    result = launch("horovodrun-gloo", 2, program, FOLDER=str(tmp_path))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("value", "overflow"), [(1.0, 0), (float("inf"), 1), (float("-inf"), 1), (float("nan"), 1)])
def test_unscaled_gradients_and_whether_one_is_not_finite(value, overflow):
    """One gradient is an empty shard."""
    gradients = [torch.tensor([2.0, 6.0]), torch.tensor([[4.0], [value]]), torch.zeros(0)]
    assert bool(unscale(gradients, 2.0, torch.device("cpu"))) == overflow
    assert gradients[0].tolist() == [1, 3] and gradients[1][0].item() == 2


def test_known_arguments():
    def function(known=True, **others):
        pass

    assert known_arguments(function, known=False, unknown=False) == {"known": False}


def test_pipelines_of_older_versions_would_count_in_batch_norms(monkeypatch):
    assert compat.keeps_buffers(PipelineStage)
    monkeypatch.delattr(PipelineStage, "_pre_metadata_inference_backup")
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    with pytest.raises(UserError, match=r"needs torch 2\.14 for a network with buffers such as 1\.running_mean"):
        object.__new__(ModelParallel).reduce(network, torch.optim.SGD(network.parameters()))


@pytest.mark.parametrize(("backend", "expected"), [("gloo", True), ("cuda:gloo", False), ("cpu:gloo,cuda:gloo", True)])
def test_which_tensors_a_process_group_takes(backend, expected):
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert takes_cpu_tensors() == expected
        with contextlib.nullcontext() if expected else pytest.raises(RuntimeError, match="No backend type"):
            torch.distributed.all_reduce(torch.zeros(1))
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_are_brought_together_without_a_warning():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        gathered = torch.zeros(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            all_gather(gathered, torch.arange(3.0))
        assert gathered.tolist() == [0, 1, 2]
    finally:
        torch.distributed.destroy_process_group()
