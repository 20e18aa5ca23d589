"""Hooks of PyTorch, Keras and HDF5 in this process, without ranks. Oracle: scripts without what the hook is for."""

from __future__ import annotations

import atexit
import io
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import safetensors.torch
import tensorflow as tf
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from allstep.commands.prove.observer import (
    files,
    keras_fit,
    pytorch,
    pytorch_data,
    pytorch_models,
    pytorch_optimizers,
    tf_distribute,
)
from allstep.commands.prove.observer import observer as observing
from allstep.commands.prove.observer.observer import Observer, Settings
from allstep.commands.prove.observer.pytorch_models import Wrappers
from allstep.commands.prove.records import FOLLOWS_LOSSES, Forward, Loop, Record, Sent, Step, Unseen, Write

DATA = list(range(12))


@pytest.fixture
def observer(tmp_path, monkeypatch):
    """Yield an observer of this file, whose hooks are removed after the test."""
    monkeypatch.setattr(atexit, "register", lambda *_args: None)
    monkeypatch.setattr(sys, "addaudithook", lambda _hook: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    handles = []

    def replace(owner, name, make):
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    for module in (files, keras_fit, observing, pytorch_data, pytorch_models, pytorch_optimizers, tf_distribute):
        monkeypatch.setattr(module, "replace", replace)
    for module in (files, pytorch_optimizers):
        monkeypatch.setattr(module, "replace_everywhere", lambda _package, *rest: replace(*rest))
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        register = getattr(pytorch_optimizers, name)
        monkeypatch.setattr(pytorch_optimizers, name, lambda hook, register=register: handles.append(register(hook)))
    yield Observer(Settings(str(tmp_path), __file__, 4))
    for handle in handles:
        handle.remove()


@pytest.fixture
def records(observer, monkeypatch) -> list[Record]:
    """Return what the hooks of models and optimizers record in the test."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", lambda record, _replica=0: found.append(record))
    wrappers = Wrappers()
    models = pytorch_models.install(observer, wrappers)
    pytorch_optimizers.install(observer, models, wrappers)
    return found


def _steps(records: list[Record], scale: float | None) -> list[Step]:
    """Train for two steps, with a GradScaler that begins at a scale."""
    records.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [one for one in records if isinstance(one, Step)]


@pytest.mark.parametrize(("words", "expected"), [([], 3), (["--multiprocessing-fork"], 7)])
def test_ranks_that_a_script_spawns_keep_their_own_seeds(words, expected, monkeypatch):
    """Equal seeds would hide that nothing broadcasts the weights."""
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setenv("RANK", "3")
    torch.manual_seed(7)
    pytorch.seed_by_rank()
    assert torch.initial_seed() == expected


def test_schedulers_that_follow_losses_are_noted(records):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert records == []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plateau.step(1.0)
    plateau.step(1.0)
    assert [one.what for one in records if isinstance(one, Unseen)] == [FOLLOWS_LOSSES]


def test_plateaus_of_keras_are_noted(observer, monkeypatch):
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", found.append)
    keras_fit.install(observer)
    model = keras.Sequential()
    model.compile("sgd", "mse")
    for callback in (keras.callbacks.LearningRateScheduler(lambda _epoch: 0.1), keras.callbacks.ReduceLROnPlateau()):
        assert found == []
        callback.set_model(model)
        callback.on_epoch_end(0, {"val_loss": 1.0})
    assert [one.what for one in found if isinstance(one, Unseen)] == [FOLLOWS_LOSSES]


def test_losses_and_gradients_are_those_without_a_scaler(records):
    """The scale is a power of 2, which grows after the first step."""
    plain, scaled = _steps(records, None), _steps(records, 1024.0)
    assert len(plain) == len(scaled) == 2
    for one, other in zip(plain, scaled, strict=True):
        assert (one.loss, one.gradients) == (other.loss, other.gradients)
        assert one.gradients[0].local == one.gradients[0].applied


@pytest.mark.parametrize("num_tasks", [0, 1, 3])
def test_gradients_that_a_script_asks_for_count_if_it_sets_them(num_tasks, records):
    """An inner loop (MAML) asks for others between backward passes that add up. Oracle: what the optimizer applies."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(num_tasks):
            [inner] = torch.autograd.grad(weight.pow(3).sum(), [weight], create_graph=True)
            (weight - 0.1 * inner).pow(2).sum().backward()
        if not num_tasks:
            [weight.grad] = torch.autograd.grad(weight.pow(3).sum(), [weight])
        optimizer.step()
    steps = [one for one in records if isinstance(one, Step)]
    assert len(steps) == 2
    for step in steps:
        assert step.gradients[0].local == pytest.approx(step.gradients[0].applied)


@pytest.mark.parametrize("trains", [False, True])
def test_gradients_that_a_script_sets_and_sends(trains, observer, monkeypatch):
    """Outer steps, and torch.func, set gradients without backward. Oracle: what the script sends, and then applies."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", lambda record, _replica=0: found.append(record))
    optimizers = pytorch_optimizers.install(observer, pytorch_models.install(observer, Wrappers()), Wrappers())
    weight = torch.ones(4).requires_grad_(trains)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.arange(4.0)
        optimizers.gradients.note_sent(weight.grad)
        weight.grad *= 2
        optimizer.step()
    if trains:
        weight.sum().backward()
        optimizer.step()
    gradients = [one.gradients[0] for one in found if isinstance(one, Step)]
    assert [one.is_set for one in gradients] == [True, True, *[False] * trains]
    assert all(np.allclose(one.applied, 2 * np.array(one.local)) for one in gradients[:2])


def test_weights_of_two_models_in_one_optimizer_have_names_of_their_own(records):
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    for _ in range(2):
        sum(model(torch.ones(3, 4)).sum() for model in models).backward()
        optimizer.step()
    expected = ["weight", "bias", "weight (2)", "bias (2)"]
    for step in (one for one in records if isinstance(one, Step)):
        assert [*step.weights] == [one.name for one in step.gradients] == expected
        assert not step.others


def test_weights_that_this_rank_does_not_step(records):
    """A ZeRO by hand gives each rank a share; frozen weights belong to none. Oracle: the names."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    steps = [one for one in records if isinstance(one, Step)]
    assert [[*one.others] for one in steps] == 2 * [["2.weight", "2.bias"]]


@pytest.mark.parametrize(
    ("order", "bound", "num_sent"),
    [
        ([0, 1, 2, 3], torch.inf, 4),  # that of the optimizer
        ([0, 2, 1, 3], torch.inf, 4),  # that of the model, as where biases are a group of their own
        ([3, 1, 2, 0], torch.inf, 0),  # unknown, and so not looked at
        ([0, 2, 1, 3], 1e-3, 0),
    ],
)
def test_gradients_that_a_script_sends_in_one_vector(order, bound, num_sent, observer, monkeypatch):
    """A vector in another order than expected is no change of gradients. Oracle: their parts."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", lambda record, _replica=0: found.append(record))
    models = pytorch_models.install(observer, Wrappers())
    optimizers = pytorch_optimizers.install(observer, models, Wrappers())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [[one for one in model.parameters() if one.dim() == size] for size in (2, 1)]
    torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    model(torch.randn(3, 4)).square().sum().backward()
    trained = [one for group in groups for one in group]
    gradients = [trained[index].grad for index in order]
    vector = torch.cat([one.reshape(-1) for one in gradients if one is not None])
    optimizers.gradients.note_sent(vector.clamp(-bound, bound))
    sent = [one for one in found if isinstance(one, Sent)]
    assert len(sent) == num_sent
    assert all(one.local == one.sent for one in sent)


def test_gradients_that_hooks_send_and_weights_that_a_script_sends(observer, monkeypatch):
    """Hooks may clip in a backward pass what they send; neighbours average weights (gossip). Oracle: the tensors."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", lambda record, _replica=0: found.append(record))
    optimizers = pytorch_optimizers.install(observer, pytorch_models.install(observer, Wrappers()), Wrappers())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda one: optimizers.gradients.note_sent(one.grad.clamp_(-1e-3, 1e-3))
        )
    model(torch.randn(3, 4)).square().sum().backward()
    assert [one.local == one.sent for one in found if isinstance(one, Sent)] == [False, False]
    before = nn.utils.parameters_to_vector(model.parameters())
    assert not optimizers.gradients.has_trained(before)
    optimizer.step()
    assert not optimizers.gradients.has_trained(before)
    assert optimizers.gradients.has_trained(nn.utils.parameters_to_vector(model.parameters()))
    assert optimizers.gradients.has_trained(model.weight.data)


class _Manual(nn.Module):
    """Model that steps by itself and returns nothing, as Lightning calls one with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, batch: torch.Tensor, steps: bool) -> None:
        self.layer(batch).sum().backward()
        if steps:
            self.optimizer.step()


@pytest.mark.parametrize("steps", [True, False])
def test_a_call_that_steps_by_itself_trains(steps, records):
    _Manual()(torch.ones(3, 4), steps)
    assert [(one.is_training, one.step) for one in records if isinstance(one, Forward)] == [(steps, 1)]


def test_a_look_at_a_batch_is_no_loop_of_training(observer):
    pytorch_data.install(observer)
    next(iter(DataLoader(DATA)))
    for _ in DataLoader(DATA):
        observer.progress.note_backward()
    assert observer.progress.first_training_loop == 2


@pytest.mark.usefixtures("records")
def test_a_model_that_is_traced_for_an_export():
    """The graph must not have operations of the observer, which fail in it. Oracle: the model's own outputs."""
    model = nn.Linear(2, 1)
    traced = torch.jit.trace(model, torch.ones(3, 2))
    assert torch.equal(traced(torch.ones(4, 2)), model(torch.ones(4, 2)))


def test_files_that_libraries_open_in_c(observer, tmp_path, monkeypatch):
    """Oracle: the files in the folder; a buffer is none."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", found.append)
    files.install(observer)
    folder, model = tmp_path / "files", nn.Linear(2, 1)
    folder.mkdir()
    for mode in ("w", "a", "r"):
        h5py.File(folder / "weights.h5", mode).close()
    torch.serialization.save(model, folder / "model.pt")
    torch.serialization.save(model, io.BytesIO())
    torch.jit._serialization.save(torch.jit.script(model), folder / "script.pt")
    monkeypatch.setattr(safetensors.torch, "serialize_file", safetensors.serialize_file)
    safetensors.torch.save_file(model.state_dict(), folder / "weights.safetensors")
    assert {one.path for one in found if isinstance(one, Write)} == set(map(str, folder.iterdir()))
    assert {one.line.partition(":")[0] for one in found if isinstance(one, Write)} == {Path(__file__).name}


def test_files_that_tensorflow_opens_in_cpp(observer, tmp_path, monkeypatch):
    """Oracle: the files in the folders. Only `save` names the latest checkpoint: ranks may `write` their own."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", found.append)
    tf_distribute.install(observer)
    tf.saved_model.save(tf.Module(), str(tmp_path / "model"))
    checkpoint = tf.train.Checkpoint(step=tf.Variable(1))
    checkpoint.write(str(tmp_path / "own" / "rank0"))
    checkpoint.save(str(tmp_path / "saved" / "step"))
    tf.train.CheckpointManager(checkpoint, str(tmp_path / "kept"), 1).save()
    writes = [one for one in found if isinstance(one, Write)]
    written = {str(path) for path in tmp_path.glob("*/*") if path.is_file() and path.name != "fingerprint.pb"}
    assert {one.path for one in writes} == written
    assert {one.line.partition(":")[0] for one in writes} == {Path(__file__).name}


class _Share(Sampler):
    """Sampler of a script."""

    def __iter__(self):
        return iter(DATA[::2])

    def __len__(self) -> int:
        return len(DATA[::2])


_ENGINE = """
def train(loader, num_batches):
    batches = iter(loader)
    for _ in range(num_batches):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
"""


@pytest.mark.parametrize(("file", "expected"), [("engine.py", [True, False]), (__file__, [True, True])])
def test_an_epoch_that_a_library_counts_goes_on_after_a_cut(file, expected, observer, monkeypatch):
    """Such as Ignite's engine, which reads a loader anew if that ends too soon: no epoch for which to set_epoch."""
    found: list[Record] = []
    monkeypatch.setattr(observer, "write", lambda record, _replica=0: found.append(record))
    monkeypatch.setattr(observer.progress, "is_over", lambda _loop, num_batches: num_batches == 2)
    monkeypatch.setattr(observer, "may_stop", lambda _frame: True)
    pytorch_data.install(observer)
    exec(compile(_ENGINE, file, "exec"), names := {})
    names["train"](DataLoader(DATA, 2, shuffle=True), 4)
    assert [one.sampler.shuffles for one in found if isinstance(one, Loop) and one.sampler] == expected


class _Epochs(_Share):
    """Sampler of a script whose order depends on its epoch."""

    shuffle = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, 2), ("SequentialSampler", False, True)),
        (DataLoader(DATA, 2, shuffle=True), ("RandomSampler", True, True)),
        (DataLoader(DATA, 2, sampler=_Share()), ("_Share", False, False)),
        (DataLoader(DATA, 2, sampler=_Epochs()), ("_Epochs", True, False)),
        (DataLoader(DATA, batch_sampler=BatchSampler(_Epochs(), 2, False)), ("_Epochs", True, False)),
        (DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 1)), ("DistributedSampler", True, False)),
    ],
)
def test_the_sampler_that_decides_on_the_order(loader, expected):
    sampler = pytorch_data._sampler(loader)
    assert (sampler.kind, sampler.shuffles, sampler.reads_all) == expected
