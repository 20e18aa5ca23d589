"""Epochs needed for an accuracy, and the loss that a number of parameters can reach."""

from __future__ import annotations

import math

KAPLAN_PARAMETERS, KAPLAN_EXPONENT = 8.8e13, 0.076


def epochs_needed(epochs: float, global_batch_size: int, critical_batch_size: float = math.inf) -> float:
    """Return the passes over the data that a target accuracy takes with a global batch.

    E = E_min (1 + B / B_crit) (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, equation 2.11, with
    E proportional to the samples): below the critical batch a pass is worth the same with any batch.

    Args:
        epochs: passes needed with a small batch.
        critical_batch_size: samples at which twice the passes are needed.
    """
    return epochs * (1 + global_batch_size / critical_batch_size)


def loss_by_parameters(num_parameters: float) -> float:
    """Return the test loss, in nats per token, of a language model with ample data and compute.

    L(N) = (N_c / N)^0.076 with N_c = 8.8e13, embeddings not counted (Kaplan et al. 2020, equation 1.1).
    """
    return (KAPLAN_PARAMETERS / num_parameters) ** KAPLAN_EXPONENT
