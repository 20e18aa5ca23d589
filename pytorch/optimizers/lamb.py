"""LAMB: Adam whose update of each layer is as long as the learning rate times the layer's weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim.adam import adam

from allstep.pytorch.compat import add, add_products, scaled
from allstep.pytorch.optimizers.layers import batches, local, local_gradients, norms


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with phi(x) = x:

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
        # Adam, where it may in one kernel, of which the learning rate -1 makes a sum with what is there.
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
