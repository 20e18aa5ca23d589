"""Training from a program of the user's own, in Keras. `pytorch/session.py` has the same for PyTorch.

    from allstep.tensorflow import Session
    history = Session(model, (x, y), (x_val, y_val), optimizer="adam", epochs=5).fit()

The same program runs alone and under horovodrun, mpirun and srun.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

if "keras" not in sys.modules:
    os.environ["KERAS_BACKEND"] = "tensorflow"

import keras

from allstep.common.api.session import BaseSession, flags_of_optimizer
from allstep.common.api.user_parts import check_kind
from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OWN_OPTIMIZER
from allstep.common.launch.placement import find_placement
from allstep.tensorflow import strategies
from allstep.tensorflow.compat import parts
from allstep.tensorflow.optimizers.state import KINDS
from allstep.tensorflow.strategies.strategy import share_cores
from allstep.tensorflow.train import session

# TensorFlow starts when the program makes its model: before the session could give this rank its share of the cores.
with contextlib.suppress(UserError):  # `fit` raises it again, and reports it in a line
    share_cores(find_placement())


def flags_of(optimizer: keras.Optimizer | Callable[[], keras.Optimizer]) -> dict[str, Any]:
    """Return the flags that describe an optimizer of Keras, as far as the run uses them.

    Raises UserError if the optimizer has an option that the run takes over, or is not an optimizer.
    """
    if not isinstance(optimizer, keras.Optimizer):
        if not callable(optimizer):
            check_kind(optimizer, keras.Optimizer)
        return {"optimizer": OWN_OPTIMIZER}
    name, _ = KINDS.get(type(optimizer), (OWN_OPTIMIZER, None))
    for part in parts(optimizer):
        kind, rate = type(part).__name__, part._learning_rate
        if isinstance(part, keras.optimizers.LossScaleOptimizer) or part.loss_scale_factor:
            raise UserError(f"{kind} cannot scale losses in a Session; give precision='fp16', which does")
        if part.gradient_accumulation_steps:
            raise UserError(f"{kind} cannot accumulate gradients in a Session; give accumulate_steps, which does")
        if part.use_ema:
            raise UserError(f"{kind} cannot replace weights by averages in a Session; give ema, which keeps both")
        if not isinstance(rate, keras.Variable):
            raise UserError(
                f"expected {kind} with a number as its learning rate, received {type(rate).__name__}; give the Session "
                "warmup_epochs and decay"
            )
    rates = [float(part.learning_rate) for part in parts(optimizer)]
    return flags_of_optimizer(name, rates, lambda option: getattr(optimizer, option, None))


class Session(BaseSession):
    """A run of the user's own model on the user's own data; `fit` trains."""

    _strategies, _session, _flags_of = strategies, staticmethod(session), staticmethod(flags_of)
