"""Muon: momentum with orthogonalised matrices, and AdamW for all other weights."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch.optim.adam import adam

from allstep.pytorch.compat import add, move_towards, scaled
from allstep.pytorch.optimizers.layers import batches, is_sharded, local, local_gradients, whole


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
