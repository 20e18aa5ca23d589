"""Transformers for text. Oracle: PyTorch's nn.TransformerEncoder with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch
from ranks import last, train
from torch import nn

from allstep.common.recipe.weights import initial_weights
from allstep.pytorch import models as pytorch_models
from allstep.tensorflow.models import build_model, canonical_weights, import_weights

LENGTH, NUM_TOKENS, NUM_CLASSES = 9, 11, 5
TOKENS = np.random.default_rng(0).integers(0, NUM_TOKENS, (3, LENGTH))


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return initial weights with noise, so that none is zero."""
    random = np.random.default_rng(1)
    return {
        name: array + random.uniform(-0.2, 0.2, array.shape).astype(np.float32)
        for name, array in initial_weights(shapes, seed=3).items()
    }


def by_pytorchs_local_layers(weights: dict[str, np.ndarray], *, causal: bool) -> torch.Tensor:
    """Return the logits of nn.TransformerEncoder."""
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    theirs = {
        "self_attn.in_proj_": "attn.qkv.",
        "self_attn.out_proj.": "attn.proj.",
        "linear1.": "mlp.fc1.",
        "linear2.": "mlp.fc2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    state = {}
    for number in range(2):
        for their, our in theirs.items():
            for kind in ("weight", "bias"):
                state[f"layers.{number}.{their}{kind}"] = tensors[f"blocks.{number}.{our}{kind}"]
    encoder.load_state_dict(state)
    values = tensors["embed.weight"][torch.from_numpy(TOKENS)] + tensors["pos_embed"]
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None
    values = encoder.eval()(values, mask)
    values = values if causal else values.mean(1)
    values = nn.functional.layer_norm(values, (64,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)
    return values @ tensors["head.weight"].T + tensors["head.bias"]


@pytest.mark.parametrize("name", ["text-encoder", "text-decoder"])
def test_logits_and_gradients(name):
    network = pytorch_models.build_model(name, (LENGTH,), NUM_CLASSES, num_tokens=NUM_TOKENS)
    model = build_model(name, (LENGTH,), NUM_CLASSES, num_tokens=NUM_TOKENS)
    shapes = {of: array.shape for of, array in pytorch_models.export_weights(network).items()}
    assert {weight.name: weight.canonical_shape for weight in canonical_weights(model)} == shapes
    weights = weights_of(shapes)
    pytorch_models.import_weights(network, weights)
    import_weights(model, weights)

    expected = by_pytorchs_local_layers(weights, causal=name == "text-decoder").detach().numpy()
    logits = network(torch.from_numpy(TOKENS))
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=0, atol=1e-4)
    logits.logsumexp(-1).sum().backward()
    with tf.GradientTape() as tape:
        ours = model(TOKENS)
        loss = tf.reduce_sum(tf.reduce_logsumexp(ours, -1))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    all_weights = list(canonical_weights(model))
    gradients = tape.gradient(loss, [weight.variable.value for weight in all_weights])
    reference = {of: parameter.grad.numpy() for of, parameter in network.named_parameters()}
    for weight, gradient in zip(all_weights, gradients, strict=True):
        received, wanted = weight.to_canonical(tf.convert_to_tensor(gradient).numpy()), reference[weight.name]
        assert np.abs(received - wanted).max() <= 1e-4 * np.abs(wanted).max() + 1e-6, weight.name


def test_a_character_sees_none_that_comes_after_it():
    network = pytorch_models.build_model("text-decoder", (LENGTH,), NUM_CLASSES, num_tokens=NUM_TOKENS).eval()
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % NUM_TOKENS
    before, after = (network(torch.from_numpy(tokens)).detach().numpy() for tokens in (TOKENS, changed))
    assert np.array_equal(before[:, :5], after[:, :5]) and (before[:, 5:] != after[:, 5:]).any((0, 2)).all()


def test_both_frameworks_learn_to_write_alike(tmp_path):
    """Train on two ranks with Horovod, and FSDP in PyTorch. TensorFlow's gradients of embeddings are lists of rows."""
    path = tmp_path / "text"
    path.write_text("to be or not to be, that is the question: " * 100)
    flags = ("--dataset", f"text:{path}", "--model", "text-decoder", "--global-batch-size", 15, "--epochs", 2,
             "--base-lr", 0.3, "--log-every", 1)  # fmt: skip
    curves = []
    for framework, launcher, strategy in (
        ("pytorch", "horovodrun-mpi", ("horovod",)),
        ("tensorflow", "horovodrun-mpi", ("horovod",)),
        ("pytorch", "alone", ("fsdp", "--num-gpus", 2)),
    ):
        output_dir = tmp_path / f"{framework}-{strategy[0]}"
        events = train(framework, launcher, 2, output_dir, *flags, "--strategy", *strategy)
        curves.append([event["loss"] for event in events if event["event"] == "step"])
        curves[-1] += [last(events, "epoch")[name] for name in ("validation_loss", "validation_accuracy")]
    assert curves[0][-3] < 0.8 * curves[0][0]
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-4)


def test_gradient_of_a_bias_is_added_up_over_tokens_first():
    """Oracle: the sum in float64. All tokens of a text have the same gradient, as after a mean over tokens."""
    import keras
    import tensorflow as tf

    from allstep.tensorflow.networks.transformers import TokenDense

    of_a_text = np.random.default_rng(0).normal(size=(59, 1, 64)).astype(np.float32) / 59
    gradient, values = np.repeat(of_a_text, 128, axis=1), tf.zeros((59, 128, 8))

    def error(layer: keras.layers.Layer) -> float:
        layer.build(values.shape)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(layer(values) * gradient)
        expected = gradient.astype(np.float64).sum((0, 1))
        return np.abs(tape.gradient(total, layer.bias.value) - expected).max() / np.abs(expected).max()

    assert error(TokenDense(64)) < 1e-6 < error(keras.layers.Dense(64))
