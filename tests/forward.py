"""The networks in NumPy, written from their description and the canonical layouts: the oracle for both frameworks."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def logits(model: str, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Logits (n, classes) in float64 of normalised images (n, height, width, channels)."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    features = np.moveaxis(images.astype(np.float64), 3, 1)
    if model == "cnn":
        features = _relu(_convolve(features, weights["conv1.weight"], weights["conv1.bias"]))
        features = _relu(_convolve(features, weights["conv2.weight"], weights["conv2.bias"]))
        features = _max_pool(features)
    features = features.reshape(len(features), -1)
    layers = ["fc1", "fc2"] if model == "cnn" else ["fc1", "fc2", "fc3"]
    for layer in layers:
        features = features @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        if layer != layers[-1]:
            features = _relu(features)
    return features


def shapes(model: str, image_shape: tuple[int, int, int], num_classes: int) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all weights."""
    height, width, channels = image_shape
    if model == "mlp":
        layers = {"fc1": (128, height * width * channels), "fc2": (128, 128), "fc3": (num_classes, 128)}
    else:
        layers = {
            "conv1": (32, channels, 3, 3),
            "conv2": (64, 32, 3, 3),
            "fc1": (128, 64 * ((height - 4) // 2) * ((width - 4) // 2)),
            "fc2": (num_classes, 128),
        }
    weights = {f"{layer}.weight": shape for layer, shape in layers.items()}
    return weights | {f"{layer}.bias": shape[:1] for layer, shape in layers.items()}


def _relu(features: np.ndarray) -> np.ndarray:
    return np.maximum(features, 0)


def _convolve(features: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    windows = sliding_window_view(features, kernel.shape[2:], axis=(2, 3))
    return np.einsum("ncyxij,ocij->noyx", windows, kernel) + bias[:, None, None]


def _max_pool(features: np.ndarray) -> np.ndarray:
    n, channels, height, width = features.shape
    cut = features[:, :, : height // 2 * 2, : width // 2 * 2]  # an odd last row or column is left out
    return cut.reshape(n, channels, height // 2, 2, width // 2, 2).max(axis=(3, 5))
