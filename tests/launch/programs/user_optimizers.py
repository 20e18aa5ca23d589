"""Sessions with optimizers of a user's own, on the ranks at hand; run by test_user_optimizers.py.

    python user_optimizers.py FRAMEWORK OPTIMIZER EPOCHS DIRECTORY [FLAG=VALUE ...]

OPTIMIZER may be `all`, in one process. A Session trains for one of EPOCHS, as 1,2, and the next one goes on from its
checkpoint. Oracle: the framework's own loop in one process over the whole batches, in the order that `sharding`
documents.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from sklearn.datasets import load_digits

from allstep.common.data.sharding import sample_order

FRAMEWORK, CHOSEN, EPOCHS, DIRECTORY, *flags = sys.argv[1:]
FLAGS = {name: json.loads(value) for name, _, value in (flag.partition("=") for flag in flags)}
EPOCHS = [int(number) for number in EPOCHS.split(",")]
BATCH, CLIP = 300, 0.5
x, y = load_digits(return_X_y=True)
x = (x[:1500] / 16).astype(np.float32)
y = y[:1500]


def batches():
    for epoch in range(EPOCHS[-1]):
        order = sample_order(np.arange(len(x)), len(x), seed=0, epoch=epoch)
        for begin in range(0, len(x), BATCH):
            yield x[order[begin : begin + BATCH]], y[order[begin : begin + BATCH]]


def train(session_of, build, name):
    """Train by Sessions; return the model that the last one was given."""
    common = {"global_batch_size": BATCH, "clip_norm": CLIP, "output_dir": f"{DIRECTORY}/{name}", **FLAGS}
    for epochs in EPOCHS:
        model, optimizer = build()
        more = {"resume": "latest"} if epochs > 1 else {}
        session_of(model, (x, y), (x[:100], y[:100]), optimizer=optimizer, epochs=epochs, **common, **more).fit()
    return model


def compare(name, found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)
    print(f"as by its own loop: {name}", flush=True)


def chosen(kinds):
    return kinds if CHOSEN == "all" else {CHOSEN: kinds[CHOSEN]}


def in_pytorch():
    import torch
    from torch import nn

    from allstep.pytorch import Session

    class SignedAverage(torch.optim.Optimizer):
        """Has a required argument, a count in each group, and a number and a tensor of each weight."""

        def __init__(self, params, lr, beta):
            super().__init__(params, {"lr": lr, "beta": beta, "count": 0})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] += 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        mean = state.setdefault("mean", torch.zeros_like(parameter))
                        state["calls"] = state.get("calls", 0) + 1
                        mean.mul_(group["beta"]).add_(parameter.grad)
                        rate = group["lr"] / (1 + 0.1 * group["count"]) / (1 + 0.1 * state["calls"])
                        parameter.sub_(rate * mean / (mean.norm() + 1))

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def groups(network):
        first, _, last = network
        return [
            {"params": list(first.parameters()), "lr": 0.01, "weight_decay": 0.1},
            {"params": list(last.parameters()), "lr": 0.04},
        ]

    kinds = {
        "radam": lambda network: torch.optim.RAdam(network.parameters(), lr=0.01),
        "amsgrad": lambda network: torch.optim.Adam(network.parameters(), lr=0.01, amsgrad=True),
        "groups": lambda network: torch.optim.SGD(groups(network), lr=0.1, momentum=0.9, dampening=0.1),
        "nadam": lambda network: torch.optim.NAdam(groups(network), lr=0.01),
    }
    kinds["own class"] = lambda network: SignedAverage(groups(network), lr=0.01, beta=0.9)
    kinds["muon"] = lambda network: torch.optim.Muon([network[0].weight, network[2].weight], lr=0.02)
    for name, kind in chosen(kinds).items():

        def build(kind=kind):
            network = model()
            return network, kind(network)

        found = train(Session, build, name)
        expected, optimizer = build()
        for inputs, targets in batches():
            expected.zero_grad()  # and the gradients of what the optimizer does not have
            nn.functional.cross_entropy(expected(torch.from_numpy(inputs)), torch.from_numpy(targets)).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
            optimizer.step()
        weights = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found.parameters()]
        compare(
            name, [one.detach().numpy() for one in weights], [one.detach().numpy() for one in expected.parameters()]
        )


def in_tensorflow():
    from allstep.tensorflow import Session  # noqa: I001 (before TensorFlow starts)

    import keras
    import tensorflow as tf

    optimizers = keras.optimizers

    def model():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(32, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="first"),
                layers.ActivityRegularization(l2=0.02),
                layers.Dense(10, name="last"),
            ]
        )

    def excluding():
        optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    def mapped():
        choice = optimizers.OptimizerMap(optimizers.SGD(0.1, momentum=0.9))
        choice["last.*"] = optimizers.RMSprop(0.01)
        return optimizers.MultiOptimizer(choice)

    kinds = {
        "lion": lambda: optimizers.Lion(0.003),
        "adafactor": lambda: optimizers.Adafactor(0.05),
        "muon": lambda: optimizers.Muon(0.01),
        "nadam": lambda: optimizers.Nadam(0.01),
        "adamw": excluding,
        "multi": mapped,
    }
    for name, kind in chosen(kinds).items():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        found = []

        def build_later(*_, found=found):  # in the scope of a strategy of tf.distribute
            found.append(model())
            return found[-1]

        # Strategies of tf.distribute need a function that builds it.
        made = (lambda kind=kind: kind) if FLAGS["strategy"] == "mirrored" else kind
        train(Session, lambda made=made, build=build_later: (build, made()), name)
        found, expected, optimizer = found[-1], model(), kind()
        variables = expected.trainable_variables
        for inputs, targets in batches():
            with tf.GradientTape() as tape:
                total = loss(targets, expected(inputs, training=True)) + tf.add_n(expected.losses)
            gradients = tape.gradient(total, [variable.value for variable in variables])
            norm = tf.linalg.global_norm(gradients)
            factor = tf.minimum(1.0, CLIP / (norm + 1e-6))
            optimizer.apply([gradient * factor for gradient in gradients], variables)
        compare(name, found.get_weights(), expected.get_weights())


if __name__ == "__main__":
    {"pytorch": in_pytorch, "tensorflow": in_tensorflow}[FRAMEWORK]()
