"""Optimizers of Keras. Oracles: their papers, transcribed in `paper_optimizers`, and the optimizers of PyTorch."""

from __future__ import annotations

import numpy as np
import paper_optimizers
import pytest
import torch

from allstep.common.config.train_config import OptimizerConfig
from allstep.common.recipe.schedule import Schedule, learning_rate
from allstep.pytorch.optimizers import build_optimizer as build_torch
from allstep.pytorch.optimizers import embeddings_of
from allstep.tensorflow.optimizers import build_optimizer as build_keras

NUM_STEPS = 50


def test_momentum_needs_no_correction_when_the_learning_rate_changes():
    """Divide the rate by 10 twice. Oracle: Goyal et al. 2017, equation 10 and remark 2 (rate in the velocity)."""
    import keras
    import tensorflow as tf

    schedule = Schedule(0.1, samples_per_epoch=NUM_STEPS, num_epochs=2, global_batch_size=1, reference_batch_size=1,
                        decay="step", milestones=(0.2, 0.5))  # fmt: skip
    config = OptimizerConfig(optimizer="sgd", momentum=0.9)
    weight, variable = torch.nn.Parameter(torch.zeros(1)), keras.Variable(np.zeros(1, np.float32))
    of_torch, of_keras = build_torch(config, [weight]), build_keras(config)
    of_keras.build([variable])
    corrected = uncorrected = velocity = plain_velocity = 0.0
    previous_rate = learning_rate(schedule, 0)
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=NUM_STEPS).astype(np.float32)):
        rate = learning_rate(schedule, step)
        velocity = 0.9 * rate / previous_rate * velocity + rate * gradient
        plain_velocity = 0.9 * plain_velocity + rate * gradient
        corrected, uncorrected, previous_rate = corrected - velocity, uncorrected - plain_velocity, rate
        set_rate(of_torch, of_keras, rate)
        weight.grad = torch.tensor([gradient])
        of_torch.step()
        of_keras.apply([tf.constant([gradient])], [variable])
    for received in (weight.item(), variable.numpy().item()):
        assert received == pytest.approx(corrected, rel=1e-5)
        assert received != pytest.approx(uncorrected, rel=1e-2)


def set_rate(of_torch, of_keras, rate: float) -> None:
    of_keras.learning_rate = rate
    for group in of_torch.param_groups:
        group["lr"] = rate


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", [*paper_optimizers.OPTIMIZERS, "sgd without momentum"])
def test_same_updates_as_torch(name, weight_decay):
    """Compare 20 updates for gradients around 1 and a changing learning rate. Training would compare rounding errors,
    because Adam amplifies differences of gradients that should be 0."""
    import keras
    import tensorflow as tf

    momentum = 0.0 if "without" in name else 0.9
    config = OptimizerConfig(optimizer=name.split()[0], momentum=momentum, weight_decay=weight_decay)
    random = np.random.default_rng(0)
    start = random.normal(size=(7, 5)).astype(np.float32)
    weight, variable = torch.nn.Parameter(torch.from_numpy(start.copy())), keras.Variable(start)
    of_torch, of_keras = build_torch(config, [weight]), build_keras(config)
    of_keras.build([variable])
    for step in range(20):
        gradient = random.normal(size=start.shape).astype(np.float32)
        set_rate(of_torch, of_keras, 0.05 / (1 + step))
        weight.grad = torch.from_numpy(gradient.copy())
        of_torch.step()
        of_keras.apply([tf.constant(gradient)], [variable])
        np.testing.assert_allclose(variable.numpy(), weight.detach().numpy(), rtol=2e-6, atol=1e-6, err_msg=f"{step}")


def test_muon_is_that_of_keras_and_torch():
    """Oracles: Keras' Muon; torch's, whose bfloat16 leaves two digits."""
    import keras
    import tensorflow as tf

    config, random = OptimizerConfig(optimizer="muon", weight_decay=0.1), np.random.default_rng(0)
    start = random.normal(size=(7, 5)).astype(np.float32)
    ours, theirs, of_torch = keras.Variable(start), keras.Variable(start), torch.nn.Parameter(torch.tensor(start))
    optimizer, keras_muon = build_keras(config), keras.optimizers.Muon(0.05, weight_decay=0.1)
    torch_muon = torch.optim.Muon([of_torch], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer.build([ours])
    optimizer.learning_rate = 0.05
    keras_muon.build([theirs])
    for _ in range(10):
        gradient = random.normal(size=start.shape).astype(np.float32)
        of_torch.grad = torch.tensor(gradient)
        torch_muon.step()
        optimizer.apply([tf.constant(gradient)], [ours])
        keras_muon.apply([tf.constant(gradient)], [theirs])
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours.numpy(), of_torch.detach().numpy(), atol=0.02)


def test_muon_leaves_embeddings_to_adamw():
    """Oracle: torch's AdamW. Keras' Muon does so, and torch's leaves the choice to its user."""
    import keras
    import tensorflow as tf

    config, random = OptimizerConfig(optimizer="muon", weight_decay=0.1), np.random.default_rng(0)
    network, expected = torch.nn.Sequential(torch.nn.Embedding(7, 5)), torch.nn.Embedding(7, 5)
    network[0].load_state_dict(expected.state_dict())
    layer = keras.layers.Embedding(7, 5, weights=[expected.weight.detach().numpy()])
    layer.build(())
    of_torch, of_keras = build_torch(config, network.parameters(), embeddings_of(network)), build_keras(config)
    assert keras.optimizers.Muon()._should_use_adamw(layer.embeddings)
    oracle = torch.optim.AdamW(expected.parameters(), lr=0.05, weight_decay=0.1)
    of_keras.build([layer.embeddings])
    set_rate(of_torch, of_keras, 0.05)
    for _ in range(3):
        gradient = random.normal(size=(7, 5)).astype(np.float32)
        network[0].weight.grad = expected.weight.grad = torch.tensor(gradient)
        of_torch.step()
        oracle.step()
        of_keras.apply([tf.constant(gradient)], [layer.embeddings])
    for weight in (network[0].weight.detach(), layer.embeddings.numpy()):
        np.testing.assert_allclose(weight, expected.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_bias_of_the_first_moments_is_corrected_to_the_last_digits_of_float32(name):
    """Oracle: PyTorch, relative to its step. The correction in TensorFlow's Adam kernel is off by 1e-5 or more."""
    import keras
    import tensorflow as tf

    config, random = OptimizerConfig(optimizer=name), np.random.default_rng(0)
    weight, variable = torch.nn.Parameter(torch.zeros(1000)), keras.Variable(np.zeros(1000, np.float32))
    of_torch, of_keras = build_torch(config, [weight]), build_keras(config)
    of_keras.build([variable])
    set_rate(of_torch, of_keras, 1.0)
    for _ in range(8):
        gradient, before = random.normal(size=1000).astype(np.float32), weight.detach().numpy().copy()
        weight.grad = torch.from_numpy(gradient)
        of_torch.step()
        of_keras.apply([tf.constant(gradient)], [variable])
        after = weight.detach().numpy()
        assert np.abs(variable.numpy() - after).max() < 5e-6 * np.abs(after - before).max()


def trained(name: str, optimizer, *, jit_compile: bool = False) -> dict[str, np.ndarray]:
    """Train the weights of `paper_optimizers` in float64, and return them."""
    import keras
    import tensorflow as tf

    weights = {name: keras.Variable(w, dtype="float64") for name, w in paper_optimizers.initial_weights().items()}
    optimizer.build(list(weights.values()))

    @tf.function(autograph=False, jit_compile=jit_compile)
    def apply(gradients: list[tf.Tensor]) -> None:
        optimizer.apply(gradients, list(weights.values()))

    for step in range(1, paper_optimizers.NUM_STEPS + 1):
        optimizer.learning_rate = paper_optimizers.learning_rate(name, step)
        apply([tf.constant(gradient) for gradient in paper_optimizers.gradients(step).values()])
    return {name: weight.numpy() for name, weight in weights.items()}


def assert_is_that_of_its_paper(received: dict[str, np.ndarray], name: str, **options) -> None:
    for key, expected in paper_optimizers.trained(name, **options).items():
        np.testing.assert_allclose(received[key], expected, rtol=1e-6, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", paper_optimizers.OPTIMIZERS)
def test_is_that_of_its_paper(name):
    """Without weight decay; the tests below have it."""
    assert_is_that_of_its_paper(trained(name, build_keras(OptimizerConfig(optimizer=name))), name, decay=0.0)


@pytest.mark.parametrize("name", paper_optimizers.OPTIMIZERS)
def test_is_the_same_under_xla(name):
    received = trained(name, build_keras(OptimizerConfig(optimizer=name, weight_decay=0.1)), jit_compile=True)
    assert_is_that_of_its_paper(received, name, decay=0.1)


@pytest.mark.parametrize("name", paper_optimizers.OPTIMIZERS)
def test_is_the_same_when_made_of_its_configuration(name):
    import keras

    config = OptimizerConfig(optimizer=name, weight_decay=0.1, grad_averaging=name == "novograd")
    optimizer = build_keras(config)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer) and again.get_config() == optimizer.get_config()
    options = {"averaging": True} if name == "novograd" else {}
    assert_is_that_of_its_paper(trained(name, again), name, decay=0.1, **options)


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd", "muon", "adagrad", "rmsprop"])
def test_goes_on_in_a_model_that_keras_has_saved(name, tmp_path):
    """Oracle: the original model."""
    import keras

    images, labels = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 3
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    optimizer = build_keras(OptimizerConfig(optimizer=name, weight_decay=0.1))
    optimizer.learning_rate = 0.01
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=name == "muon")  # XLA takes seconds; the test above has it
    model.fit(images, labels, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, again):
        one.fit(images, labels, batch_size=8, shuffle=False, verbose=0)
    for expected, received in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd", "muon", "adagrad", "rmsprop"])
def test_refuses_sparse_gradients(name):
    import keras
    import tensorflow as tf

    table, optimizer = keras.Variable(np.ones((5, 2), np.float32)), build_keras(OptimizerConfig(optimizer=name))
    optimizer.build([table])
    with pytest.raises(TypeError, match="expected dense gradients for .*, received tf.IndexedSlices"):
        optimizer.apply([tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3]), (5, 2))], [table])


def test_what_the_user_excludes_does_not_decay():
    import keras
    import tensorflow as tf

    one, other = (keras.Variable(np.ones((2, 2)), dtype="float32", name=name) for name in ("one", "other"))
    optimizer = build_keras(OptimizerConfig(optimizer="novograd", weight_decay=0.5))
    optimizer.exclude_from_weight_decay([other])
    optimizer.build([one, other])
    optimizer.learning_rate = 1.0
    optimizer.apply([tf.zeros((2, 2))] * 2, [one, other])
    assert one.numpy()[0, 0] == 0.5 and other.numpy()[0, 0] == 1.0
