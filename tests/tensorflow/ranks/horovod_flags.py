"""Test `--compression` and `--op` on the gradients of two ranks, and print `all right` on each rank.

Oracle: one step of SGD with a learning rate of 1 from weights of 0, so the weights are minus the reduced gradient.
For Adasum (Maleki et al. 2021, section 3): the sum of orthogonal gradients, and the mean of equal ones.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras
import numpy as np
import tensorflow as tf

from allstep.common.config.train_config import OptimizerConfig, StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.tensorflow.optimizers import build_optimizer
from allstep.tensorflow.strategies.horovod import Horovod

placement = find_placement()


def step(gradient: list[float], **flags: str) -> np.ndarray:
    """Return the amount that the optimizer subtracts from the weights of this rank."""
    strategy = Horovod(placement, StrategyConfig(**flags))
    strategy.init()
    weights = keras.Variable(np.zeros(2, np.float32))
    optimizer = build_optimizer(OptimizerConfig(momentum=0.0))
    optimizer.build([weights])
    _, optimizer = strategy.wrap(keras.Sequential(), optimizer)
    optimizer.learning_rate = 1.0
    optimizer.apply([tf.constant(gradient)], [weights])
    return -weights.numpy()


third = 1 / 3
mine = [[third, 3.0], [third, 1.0]][placement.rank]
np.testing.assert_array_equal(step(mine), np.float32([third, 2.0]))
np.testing.assert_array_equal(step(mine, op="sum"), np.float32([2 * third, 4.0]))
# A third in half precision is 0.33325195.
np.testing.assert_array_equal(step(mine, compression="fp16"), np.float32([np.float16(third), 2.0]))
np.testing.assert_allclose(step([[1.0, 0.0], [0.0, 1.0]][placement.rank], op="adasum"), [1.0, 1.0])
np.testing.assert_allclose(step([2.0, 3.0], op="adasum"), [2.0, 3.0])
print("all right")
