"""PyTorch's optimizers in float64. Oracle: their papers, transcribed in `paper_optimizers`."""

from __future__ import annotations

import itertools

import numpy as np
import paper_optimizers
import pytest
import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OWN_OPTIMIZER, OptimizerConfig
from allstep.pytorch.optimizers import build_optimizer, with_whole_norms, without_fused_kernels
from allstep.pytorch.optimizers.state import OwnState
from allstep.pytorch.session import flags_of
from allstep.pytorch.settings import Settings

NUM_STEPS = 50


def trained(config: OptimizerConfig) -> dict[str, np.ndarray]:
    weights = {name: torch.nn.Parameter(torch.tensor(w)) for name, w in paper_optimizers.initial_weights().items()}
    optimizer = build_optimizer(config, weights.values())
    for step in range(1, paper_optimizers.NUM_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = paper_optimizers.learning_rate(config.optimizer, step)
        for name, gradient in paper_optimizers.gradients(step).items():
            weights[name].grad = torch.tensor(gradient)
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", paper_optimizers.OPTIMIZERS)
def test_is_that_of_its_paper(name, decay):
    received = trained(OptimizerConfig(optimizer=name, weight_decay=decay))
    for key, expected in paper_optimizers.trained(name, decay=decay).items():
        np.testing.assert_allclose(received[key], expected, rtol=1e-6, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_without_momentum(name):
    received = trained(OptimizerConfig(optimizer=name, momentum=0.0, weight_decay=0.1))
    for key, expected in paper_optimizers.trained(name, decay=0.1, momentum=0.0).items():
        np.testing.assert_allclose(received[key], expected, rtol=1e-6, atol=1e-12, err_msg=key)


def test_novograd_with_averaged_gradients():
    received = trained(OptimizerConfig(optimizer="novograd", grad_averaging=True, weight_decay=0.1))
    for key, expected in paper_optimizers.trained("novograd", decay=0.1, averaging=True).items():
        np.testing.assert_allclose(received[key], expected, rtol=1e-6, atol=1e-12, err_msg=key)


def built(config, weights, *, sliced):
    """Return the optimizer of `build_optimizer`, or what --slices makes of it."""
    optimizer = build_optimizer(config, weights)
    if sliced:
        without_fused_kernels(optimizer)
        with_whole_norms(optimizer)
    return optimizer


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd", "muon"])
def test_made_anew_of_its_groups_it_is_the_same(name):
    """Horovod, and our FSDP strategy, recreate optimizers from their groups."""
    config = OptimizerConfig(optimizer=name, weight_decay=0.1, grad_averaging=name == "novograd")
    weights = [torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(2)]
    first = build_optimizer(config, weights[:1])
    groups = build_optimizer(config, weights[1:]).param_groups
    for optimizer in (first, type(first)(groups)):
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full((3, 2), 2.0 + step, dtype=torch.float64)
            optimizer.step()
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "adamw"])
def test_fused_updates_are_the_same(name, weight_decay):
    """Oracle: the same update in separate operations, as with --slices."""
    config = OptimizerConfig(optimizer=name, weight_decay=weight_decay)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=random)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [built(config, [weight], sliced=sliced) for weight, sliced in zip(weights, (True, False), strict=True)]
    for step in range(NUM_STEPS):
        gradient = torch.randn(7, 5, generator=random)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=2e-6, atol=1e-6)
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [None, True]


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "lars", "lamb"])
def test_with_slices_no_bit_depends_on_where_a_weight_is_cut(name):
    """Cut a weight as FSDP does. Oracle: the whole weight, with one axis, so LARS and LAMB do not compute its norm."""
    config, random = OptimizerConfig(optimizer=name, weight_decay=0.1), torch.Generator().manual_seed(0)
    weight, cuts = torch.randn(1001, generator=random), (0, 3, 500, 1000, 1001)
    whole = [torch.nn.Parameter(weight.clone())]
    parts = [torch.nn.Parameter(weight[begin:end].clone()) for begin, end in itertools.pairwise(cuts)]
    optimizers = [built(config, weights, sliced=True) for weights in (whole, parts)]
    for _ in range(NUM_STEPS):
        gradient = torch.randn(1001, generator=random)
        whole[0].grad = gradient.clone()
        for part, (begin, end) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = gradient[begin:end].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.037
            optimizer.step()
    assert torch.equal(torch.cat(parts), whole[0])


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop", "lamb"])
def test_a_step_waits_for_no_number_of_its_device(name):
    """Oracle: the meta device, on which reading a value raises an error; on a GPU a step would wait for it."""
    with torch.device("meta"):  # like a strategy's `scope`
        layer = torch.nn.Linear(3, 2)
        # The meta device has no fused kernels.
        sliced = name in ("sgd", "adam")
        optimizer = built(OptimizerConfig(optimizer=name), layer.parameters(), sliced=sliced)
    for _ in range(2):
        layer(torch.ones(4, 3, device="meta")).sum().backward()
        optimizer.step()


class Lookahead(torch.optim.SGD):
    """Optimizer that keeps slow copies of weights in an attribute (Zhang et al. 2019)."""

    def __init__(self, parameters: list) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [one.detach().clone() for one in parameters]


class Wrapper(torch.optim.Optimizer):
    """Optimizer whose steps another one takes, which keeps the state."""

    def __init__(self, parameters: list) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups)

    def step(self, closure: None = None) -> None:
        self.base.step()


class Slowing(torch.optim.Optimizer):
    """Optimizer whose steps become smaller by a count that it keeps anywhere but in its state."""

    def __init__(self, parameters: list, count: list) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = count if type(self) is Slowing else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (self.count or _COUNT).append(1)
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight.grad / len(self.count or _COUNT))


class Hidden(Slowing):
    """Optimizer that counts in a variable of its module."""


class ScheduleFree(torch.optim.SGD):
    """Optimizer that has other weights for validation (Defazio et al. 2024)."""

    def eval(self) -> None:
        """Change weights."""


_COUNT = [1]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (Lookahead, "Lookahead, which remembers slow outside of its state"),
        (Wrapper, "Wrapper, which remembers base outside of its state"),
        (lambda weights: Slowing(weights, [1]), "Slowing, which remembers count outside of its state"),
        (lambda weights: Hidden(weights, []), "Hidden, which steps otherwise from the same state"),
        (ScheduleFree, "ScheduleFree, which has other weights for validation"),
    ],
)
def test_optimizers_with_a_state_that_checkpoints_would_lack_are_refused(build, line):
    with pytest.raises(UserError, match=f"received {line}"):
        OwnState(build([torch.nn.Parameter(torch.ones(2))]))


class Anchored(torch.optim.SGD):
    """Optimizer that draws weights to those at its beginning, and counts steps as NumPy does."""

    def __init__(self, parameters: list) -> None:
        super().__init__(parameters, lr=0.1)
        for weight in parameters:
            self.state[weight].update(start=weight.detach().clone(), count=np.int64(0))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["count"] += 1
            weight.sub_(0.1 * (weight.grad + weight - self.state[weight]["start"]))


def test_state_that_an_optimizer_brings_stays():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Anchored([weight])
    kept = {name: one.numpy() for name, one in OwnState(optimizer).export([("w", weight)], 0)}
    assert kept["optimizer/w/start"].tolist() == [1, 1] and kept["optimizer/w/count"] == 0
    weight.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))


def test_state_of_another_shape_than_before_is_told(capfd):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Anchored([weight])
    state = OwnState(optimizer)
    optimizer.state[weight]["start"] = torch.ones(3)
    list(state.export([("w", weight)], 1))
    assert "Anchored changes what it remembers as start: --resume will be refused" in capfd.readouterr().err


def test_a_number_may_become_a_fraction_or_a_tensor_after_the_first_step():
    """torch_optimizer's Lamb keeps the integer 1 as the trust ratio of a weight of zeros, and else a tensor."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Anchored([weight])
    state = OwnState(optimizer)
    for ratio in (1, 0.5, torch.tensor(0.5)):
        optimizer.state[weight]["count"] = ratio
        shape = dict(state.shapes([("w", weight)]))["optimizer/w/count"]
        kept = {name: one.numpy() for name, one in state.export([("w", weight)], 1)}
        assert kept["optimizer/w/count"].dtype == shape.dtype
        state.load([("w", weight)], kept, 1, lambda array, _: torch.from_numpy(array))
        assert optimizer.state[weight]["count"] == ratio


def test_groups_may_have_options_of_their_own():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "momentum": 0.9}, {"params": weights[1:]}]
    assert flags_of(torch.optim.SGD(groups, lr=0.1)) == {"optimizer": OWN_OPTIMIZER, "base_lr": 0.1}
    for options in ({"capturable": True}, {"differentiable": True}):  # some of which cannot step here: tried before
        assert flags_of(torch.optim.Adam(weights, lr=0.1, **options)) == {"optimizer": OWN_OPTIMIZER, "base_lr": 0.1}
    with pytest.raises(UserError, match="an optimizer with a learning rate lr, received Optimizer"):
        flags_of(torch.optim.Optimizer(weights, {}))


class Counting(torch.optim.SGD):
    """Optimizer whose groups count steps from the first one on, as several of timm's do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                weight.sub_(weight.grad / group["step"])


def test_a_count_of_steps_begins_with_the_first_one():
    def settings_of(optimizer: Counting) -> Settings:
        return Settings(lambda: iter([("w", weight)]), optimizer, OwnState(optimizer).options)

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Counting([weight], lr=0.1)
    settings = settings_of(optimizer)
    assert not list(settings.export())
    for _ in range(2):
        weight.grad = torch.ones(2)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), -0.5))
    kept = {name: one.numpy() for name, one in settings.export()}
    settings_of(other := Counting([weight], lr=0.1)).load(kept)
    assert other.param_groups[0]["step"] == 2
    settings.load({})
    assert "step" not in optimizer.param_groups[0]


class Decaying(torch.optim.SGD):
    """Optimizer that lowers its learning rate by itself."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.param_groups[0]["lr"] *= 0.9


def test_learning_rates_are_those_of_the_run():
    with pytest.raises(UserError, match="received Decaying, which changes its learning rate, which is the run's"):
        OwnState(Decaying([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserError, match="expected SGD without a scheduler, whose learning rates the run would replace"):
        flags_of(optimizer)
    with pytest.raises(UserError, match="expected a name of --optimizer or an optimizer of torch, received list"):
        flags_of([])
