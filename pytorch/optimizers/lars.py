"""LARS: each layer's learning rate follows the ratio of the norms of its weight and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from allstep.pytorch.compat import add, scale
from allstep.pytorch.optimizers.layers import LayerwiseSGD, local, norms


class Lars(LayerwiseSGD):
    """You et al. 2017, algorithm 1, with the learning rate outside of the velocity, as in torch's SGD:

        ratio = 0.001 * |w| / (|g| + decay * |w| + 1e-8)
        m = momentum * m + ratio * (g + decay * w);  w = w - lr * m

    The ratio is 1 where |w| or |g| is 0, and in groups that are not `layerwise`. At a learning rate that changes this
    is not the paper's velocity, which has the rates of the steps before in it.
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
