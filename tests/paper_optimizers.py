"""Optimizers transcribed from their papers in float64 NumPy, the oracle for the frameworks' optimizers.

Each takes a weight w, its gradient g, the learning rate, the decay factor, the step t from 1, and `memory`, a dict that
is empty before the first step; it returns the new weight. Where a paper leaves a choice open, or implementations
differ, the comment names the choice made here.
"""

from __future__ import annotations

import numpy as np


def sgd(w, g, lr, decay, t, memory, *, momentum=0.9):
    """Polyak 1964 in the form of Sutskever et al. 2013, with the learning rate outside the velocity, as in torch."""
    velocity = momentum * memory.get("v", np.zeros_like(w)) + (g + decay * w)
    memory["v"] = velocity
    return w - lr * velocity


def nesterov(w, g, lr, decay, t, memory, *, momentum=0.9):
    """Sutskever et al. 2013, section 2, in the weights that look ahead (Bengio et al. 2013, equation 7)."""
    gradient = g + decay * w
    memory["v"] = momentum * memory.get("v", np.zeros_like(w)) + gradient
    return w - lr * (momentum * memory["v"] + gradient)


def adam(w, g, lr, decay, t, memory):
    """Kingma and Ba 2015, algorithm 1, with the decay added to the gradient."""
    return w - lr * _adam_update(g + decay * w, t, memory, epsilon=1e-8)


def adamw(w, g, lr, decay, t, memory):
    """Loshchilov and Hutter 2019, algorithm 2, with the schedule's multiplier in both terms, as in torch."""
    return w - lr * _adam_update(g, t, memory, epsilon=1e-8) - lr * decay * w


def lars(w, g, lr, decay, t, memory, *, momentum=0.9):
    """You et al. 2017, algorithm 1, eta = 0.001, only for weights, with the learning rate outside the velocity."""
    ratio, weight_norm, gradient_norm = 1.0, np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
    if w.ndim > 1 and weight_norm and gradient_norm:
        ratio = 0.001 * weight_norm / (gradient_norm + decay * weight_norm + 1e-8)
    memory["v"] = momentum * memory.get("v", np.zeros_like(w)) + ratio * (g + decay * w)
    return w - lr * memory["v"]


def lamb(w, g, lr, decay, t, memory):
    """You et al. 2020, algorithm 2, with phi the identity and the ratio only for weights; epsilon is 1e-6."""
    update = _adam_update(g, t, memory, epsilon=1e-6) + decay * w
    weight_norm, update_norm = np.linalg.norm(w.ravel()), np.linalg.norm(update.ravel())
    if w.ndim > 1 and weight_norm > 0 and update_norm > 0:
        update = update * (weight_norm / update_norm)
    return w - lr * update


def novograd(w, g, lr, decay, t, memory, *, averaging=False):
    """Ginsburg et al. 2019, algorithm 1, with 0.95 and 0.98; v starts with the first gradient that is not 0."""
    square = float(np.vdot(g, g))
    memory["v"] = 0.98 * memory["v"] + 0.02 * square if memory.get("v") else square
    normalised = g / (np.sqrt(memory["v"]) + 1e-8) + decay * w
    if averaging:
        normalised = (1 - 0.95) * normalised
    memory["m"] = normalised if t == 1 else 0.95 * memory["m"] + normalised
    return w - lr * memory["m"]


def muon(w, g, lr, decay, t, memory):
    """Jordan et al. 2024 with the scale of Liu et al. 2025, equation 4, for matrices; AdamW for all else."""
    if w.ndim != 2:
        return adamw(w, g, lr, decay, t, memory)
    memory["m"] = 0.95 * memory.get("m", 0.0) + (1 - 0.95) * g
    x = (1 - 0.95) * g + 0.95 * memory["m"]
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return w - lr * decay * w - lr * 0.2 * np.sqrt(max(w.shape)) * x


def adagrad(w, g, lr, decay, t, memory):
    """Duchi et al. 2011, figure 1, with a diagonal matrix; epsilon is 1e-10, added to the root."""
    gradient = g + decay * w
    memory["s"] = memory.get("s", 0.0) + gradient**2
    return w - lr * gradient / (1e-10 + np.sqrt(memory["s"]))


def rmsprop(w, g, lr, decay, t, memory):
    """Tieleman and Hinton 2012, slide 29, with 0.99 for their 0.9; epsilon is 1e-8, added to the root."""
    gradient = g + decay * w
    memory["s"] = 0.99 * memory.get("s", 0.0) + (1 - 0.99) * gradient**2
    return w - lr * gradient / (1e-8 + np.sqrt(memory["s"]))


def _adam_update(g, t, memory, *, epsilon):
    memory["m"] = 0.9 * memory.get("m", 0.0) + (1 - 0.9) * g
    memory["v"] = 0.999 * memory.get("v", 0.0) + (1 - 0.999) * g * g
    return (memory["m"] / (1 - 0.9**t)) / (np.sqrt(memory["v"] / (1 - 0.999**t)) + epsilon)


OPTIMIZERS = {f.__name__: f for f in (sgd, nesterov, adam, adamw, lars, lamb, novograd, muon, adagrad, rmsprop)}

SHAPES = {"conv.weight": (4, 3, 3, 3), "fc.weight": (7, 5), "fc.bias": (7,), "norm.weight": (5,), "zero.weight": (2, 3)}
NUM_STEPS = 100


def initial_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Return initial weights, one of which is 0, as those of a last batch norm may be."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) * ("zero" not in name) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """Return gradients of size 1; in step 1, one of them is 0, as those of dead units are."""
    random = np.random.default_rng(100 + step)
    return {name: random.normal(size=shape) * (step > 1 or name != "fc.weight") for name, shape in SHAPES.items()}


def learning_rate(name: str, step: int) -> float:
    """Return a number of float32, as Keras keeps it; LARS needs a larger one, since its ratios are at most 0.001."""
    return float(np.float32((5 if name == "lars" else 0.05) / step))


def trained(name: str, *, decay: float, num_steps: int = NUM_STEPS, **options: float) -> dict[str, np.ndarray]:
    """Return the weights after `num_steps` steps; biases and scales of norms do not decay."""
    weights, memories = initial_weights(), {shape: {} for shape in SHAPES}
    for t in range(1, num_steps + 1):
        for key, g in gradients(t).items():
            factor = decay if weights[key].ndim > 1 else 0.0
            weights[key] = OPTIMIZERS[name](
                weights[key], g, learning_rate(name, t), factor, t, memories[key], **options
            )
    return weights
