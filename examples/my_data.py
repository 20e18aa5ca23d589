"""Custom data set for `--dataset`: points in a plane, classified by which of two spirals they are on.

python pytorch/train.py --dataset examples/my_data.py:load --model mlp
"""

import numpy as np


def load() -> tuple[np.ndarray, ...]:
    """Return x_train, y_train, x_validation, y_validation."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 2000)
    angle = random.uniform(1, 3 * np.pi, 2000)
    points = (angle / 10 * [np.cos(angle + np.pi * labels), np.sin(angle + np.pi * labels)]).T
    points += random.normal(scale=0.02, size=points.shape)
    return points[:1600], labels[:1600], points[1600:], labels[1600:]
