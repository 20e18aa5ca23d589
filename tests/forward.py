"""The networks in NumPy, written from their description and the canonical layouts: the oracle for both frameworks."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def logits(model: str, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return logits (n, classes) in float64 of normalised images (n, height, width, channels)."""
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


def resnet_logits(model: str, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return logits in float64 of resnet32 to resnet110 by He et al. 2016, section 4.2, and of wide-resnet by Zagoruyko
    and Komodakis 2016, table 1, in evaluation mode: batch norm uses the running statistics."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    features = np.moveaxis(images.astype(np.float64), 3, 1)
    wide = model == "wide-resnet"

    def convolve(features: np.ndarray, name: str, stride: int) -> np.ndarray:
        kernel = weights[f"{name}.weight"]
        around = kernel.shape[2] // 2
        padded = np.pad(features, ((0, 0), (0, 0), (around, around), (around, around)))
        return _convolve(padded, kernel, np.zeros(len(kernel)))[:, :, ::stride, ::stride]

    def normalise(features: np.ndarray, name: str) -> np.ndarray:
        mean, variance, scale, shift = (
            weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (features - mean) / np.sqrt(variance + 1e-5) * scale + shift

    features = convolve(features, "conv1", 1)
    if not wide:
        features = _relu(normalise(features, "bn1"))
    stages = "group" if wide else "layer"
    inside = [name.removeprefix(stages) for name in weights if name.startswith(stages)]
    blocks = sorted({tuple(map(int, name.split(".")[:2])) for name in inside})
    for stage, index in blocks:
        name, stride = f"{stages}{stage}.{index}", 2 if stage > 1 and index == 0 else 1
        if wide:
            first = _relu(normalise(features, f"{name}.bn1"))
            shortcut = f"{name}.shortcut"
            features = convolve(first, shortcut, stride) if f"{shortcut}.weight" in weights else features
            second = _relu(normalise(convolve(first, f"{name}.conv1", stride), f"{name}.bn2"))
            features = features + convolve(second, f"{name}.conv2", 1)
        else:
            first = _relu(normalise(convolve(features, f"{name}.conv1", stride), f"{name}.bn1"))
            second = normalise(convolve(first, f"{name}.conv2", 1), f"{name}.bn2")
            added = (second.shape[1] - features.shape[1]) // 2
            shortcut = np.pad(features[:, :, ::stride, ::stride], ((0, 0), (added, added), (0, 0), (0, 0)))
            features = _relu(second + shortcut)
    if wide:
        features = _relu(normalise(features, "bn"))
    return features.mean(axis=(2, 3)) @ weights["fc.weight"].T + weights["fc.bias"]


def shapes(model: str, image_shape: tuple[int, int, int], num_classes: int) -> dict[str, tuple[int, ...]]:
    """Return canonical names and shapes of all weights."""
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
