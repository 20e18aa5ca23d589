"""Optimizers whose update of a layer follows all of its weights: norms, or orthogonal matrices (Muon).

`tensorflow/optimizers/layerwise.py` has the same.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch.optim.adam import adam

from allstep.pytorch.compat import add, add_products, move_towards, scale, scaled
from allstep.pytorch.optimizers.layers import LayerwiseSGD, batches, is_sharded, local, local_gradients, norms, whole


class Lars(LayerwiseSGD):
    """LARS (You et al. 2017, algorithm 1), with the learning rate outside of the velocity, as in torch's SGD:

        ratio = 0.001 * |w| / (|g| + decay * |w| + 1e-8)
        m = momentum * m + ratio * (g + decay * w);  w = w - lr * m

    The ratio is 1 where |w| or |g| is 0, and in groups that are not `layerwise`. The paper's velocity also contains the
    learning rates of earlier steps, which makes a difference when the rate changes.
    """

    TRUST, EPSILON = 0.001, 1e-8

    def __init__(
        self, groups: Iterable[dict], lr: float = 0.0, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, layerwise=True)

    def change(self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor], group: dict) -> None:
        weights, decay = local(parameters), group["layer_decay"]
        if group["layerwise"]:
            weight_norms, gradient_norms = norms(parameters, weights, gradients, sliced=group["sliced"])
            ratios = self.TRUST * weight_norms / (gradient_norms + decay * weight_norms + self.EPSILON)
            ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
        if decay:
            add(gradients, weights, factor=decay)
        if group["layerwise"]:
            scale(gradients, list(ratios))


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2) with phi(x) = x:

        m = 0.9 * m + 0.1 * g;  v = 0.999 * v + 0.001 * g^2
        u = m / (1 - 0.9^t) / (sqrt(v / (1 - 0.999^t)) + 1e-6) + decay * w
        w = w - lr * |w| / |u| * u

    |w| / |u| is 1 where one of them is 0, and in groups that are not `layerwise`. The gradient is not clipped.
    """

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6

    def __init__(self, groups: Iterable[dict], lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "layerwise": True, "sliced": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameters in batches(group["params"]):
                self._move(parameters, group)

    def _move(self, parameters: Sequence[torch.Tensor], group: dict) -> None:
        weights = local(parameters)
        updates = self._updates(parameters, weights, group["weight_decay"], fused=not group["sliced"])
        if group["layerwise"]:
            weight_norms, update_norms = norms(parameters, weights, updates, sliced=group["sliced"])
            ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
            add_products(weights, updates, list(ratios), factor=-group["lr"])
        else:
            add(weights, updates, factor=-group["lr"])

    def _updates(
        self, parameters: Sequence[torch.Tensor], weights: list[torch.Tensor], decay: float, *, fused: bool
    ) -> list[torch.Tensor]:
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if fused:
                state["step"] = state["step"].to(parameter.device)
        updates = scaled(weights, decay)
        # Adam's step with learning rate -1 adds its update to `updates`, fused into one kernel where allowed.
        adam(
            updates,
            local_gradients(parameters),
            local([state["exp_avg"] for state in states]),
            local([state["exp_avg_sq"] for state in states]),
            [],
            [state["step"] for state in states],
            fused=fused or None,
            amsgrad=False,
            beta1=self.BETA_1,
            beta2=self.BETA_2,
            lr=-1.0,
            weight_decay=0.0,
            eps=self.EPSILON,
            maximize=False,
        )
        return updates


class NovoGrad(LayerwiseSGD):
    """NovoGrad (Ginsburg et al. 2019, algorithm 1), for weights and, without decay, for biases and the scales of norms:

        v = 0.98 * v + 0.02 * |g|^2, but |g|^2 where v is 0, as it is in the first step
        m = 0.95 * m + c * (g / (sqrt(v) + 1e-8) + decay * w);  w = w - lr * m

    c is 1, or 0.05 with `grad_averaging`, a variant in the paper.
    """

    BETA_1, BETA_2, EPSILON = 0.95, 0.98, 1e-8

    def __init__(
        self, groups: Iterable[dict], lr: float = 0.0, weight_decay: float = 0.0, grad_averaging: bool = False
    ) -> None:
        factor = 1 - self.BETA_1 if grad_averaging else 1.0
        super().__init__(groups, lr=lr, momentum=self.BETA_1, weight_decay=weight_decay, scale=factor)

    def change(self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor], group: dict) -> None:
        [gradient_norms] = norms(parameters, gradients, sliced=group["sliced"])
        squares, states = gradient_norms.square(), [self.state[parameter] for parameter in parameters]
        before = torch.stack([state.get("layer_exp_avg_sq", torch.zeros_like(squares[0])) for state in states])
        running = torch.where(before == 0, squares, self.BETA_2 * before + (1 - self.BETA_2) * squares)
        for state, value in zip(states, running.unbind(), strict=True):
            state["layer_exp_avg_sq"] = value
        scale(gradients, list(group["scale"] / (running.sqrt() + self.EPSILON)))
        if group["layer_decay"]:
            add(gradients, local(parameters), factor=group["scale"] * group["layer_decay"])


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024, with the scale of Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4:

        m = 0.95 * m + 0.05 * g;  u = 0.05 * g + 0.95 * m
        w = w - lr * decay * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

    torch.optim.Muon with adjust_lr_fn="match_rms_adamw" and Keras' Muon have this formula; torch's makes matrices
    orthogonal in bfloat16, this one and Keras' in the weights' type. AdamW updates weights without two axes, and, as in
    Keras, those of embeddings: `build_optimizer` has them in groups of their own.
    """

    MOMENTUM, BETA_1, BETA_2, EPSILON = 0.95, 0.9, 0.999, 1e-8

    def __init__(self, groups: Iterable[dict], lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "sliced": False, "are_matrices": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            update = self._move_matrices if group["are_matrices"] else self._move_others
            for parameters in batches(group["params"]):
                update(parameters, group)

    def _move_matrices(self, parameters: Sequence[torch.Tensor], group: dict) -> None:
        averages, gradients = local(self._slots(parameters, "momentum_buffer")), local_gradients(parameters)
        move_towards(averages, gradients, 1 - self.MOMENTUM)
        updates = scaled(gradients, 1 - self.MOMENTUM)
        add(updates, averages, factor=self.MOMENTUM)
        if is_sharded(parameters[0]):
            updates = whole(parameters, updates)
        if group["weight_decay"]:
            add(local(parameters), local(parameters), factor=-group["lr"] * group["weight_decay"])
        for parameter, weight, update in zip(parameters, local(parameters), updates, strict=True):
            self.state[parameter]["step"] += 1
            rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
            weight.add_(local_rows(parameter, orthogonal(update)), alpha=-rate)

    def _move_others(self, parameters: Sequence[torch.Tensor], group: dict) -> None:
        means, squares = (local(self._slots(parameters, name)) for name in ("exp_avg", "exp_avg_sq"))
        adam(
            local(parameters),
            local_gradients(parameters),
            means,
            squares,
            [],
            [self.state[parameter]["step"] for parameter in parameters],
            foreach=True,
            amsgrad=False,
            beta1=self.BETA_1,
            beta2=self.BETA_2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.EPSILON,
            maximize=False,
            decoupled_weight_decay=True,
        )

    def _slots(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return the slot of that name of each parameter, initialised with zeros."""
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter)
                state.setdefault("step", torch.zeros((), device="cpu"))
        return [self.state[parameter][name] for parameter in parameters]


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about U V^T for a matrix U S V^T, by five steps of a Newton-Schulz iteration (Jordan et al. 2024)."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def local_rows(parameter: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix that this rank holds of `parameter`: all, or under FSDP some."""
    if not is_sharded(parameter):
        return matrix
    mesh = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    size = -(-len(matrix) // mesh.size())
    return matrix[mesh.get_local_rank() * size :][:size]
