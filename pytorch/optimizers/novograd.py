"""NovoGrad: SGD with momentum on gradients that are divided, layer by layer, by the running size of their norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from allstep.pytorch.compat import add, scale
from allstep.pytorch.optimizers.layers import LayerwiseSGD, local, norms


class NovoGrad(LayerwiseSGD):
    """Ginsburg et al. 2019, algorithm 1, for weights and, without decay, for biases and the scales of norms:

        v = 0.98 * v + 0.02 * |g|^2, but |g|^2 where v is 0, as it is in the first step
        m = 0.95 * m + c * (g / (sqrt(v) + 1e-8) + decay * w);  w = w - lr * m

    c is 1, or 0.05 with `grad_averaging`, which the paper has as a variant.
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
