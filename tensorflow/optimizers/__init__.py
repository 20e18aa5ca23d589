"""Optimizers by the names of `--optimizer`, with the formulas of `pytorch/optimizers`.

The docstring of each says how Keras' own differs. They are ordinary Keras optimizers, usable with any Keras model,
saving, `jit_compile` and tf.distribute.
"""

import keras

from allstep.common.api.user_parts import check_kind
from allstep.common.base.errors import UserError, note
from allstep.common.config.train_config import OptimizerConfig
from allstep.common.launch.placement import apparent_rank
from allstep.tensorflow.compat import layers_of, parts, trained_variables
from allstep.tensorflow.optimizers.base import Optimizer
from allstep.tensorflow.optimizers.elementwise import SGD, Adagrad, Adam, RMSprop
from allstep.tensorflow.optimizers.layerwise import LAMB, LARS, Muon, NovoGrad

__all__ = ["LAMB", "LARS", "SGD", "Adagrad", "Adam", "Muon", "NovoGrad", "RMSprop", "build_optimizer"]

_KINDS = {
    **dict.fromkeys(("sgd", "nesterov"), SGD),
    **dict.fromkeys(("adam", "adamw"), Adam),
    "lars": LARS,
    "lamb": LAMB,
    "novograd": NovoGrad,
    "muon": Muon,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}


def check_parameters(optimizer: keras.Optimizer, model: keras.Model) -> None:
    """Raise UserError if an optimizer was built for another model; note how it treats gradients of embeddings."""
    check_kind(optimizer, keras.Optimizer)
    known = {id(variable) for variable in model.trainable_variables}
    rows = [layer.path for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding) and layer.trainable]
    for part in parts(optimizer):
        if type(part).apply_gradients is not keras.Optimizer.apply_gradients:
            raise UserError(
                f"{type(part).__name__} has an apply_gradients of its own, which is not called; define apply"
            )
        if part.built and any(id(variable) not in known for variable in trained_variables(part)):
            raise UserError("the optimizer has parameters that are not the model's; give each model a new one")
        clips = part.clipnorm or part.clipvalue or part.global_clipnorm
        is_sum = isinstance(part, Optimizer) or (type(part) is keras.optimizers.SGD and not clips)
        if rows and not is_sum and apparent_rank() == 0:
            note(
                f"{type(part).__name__} gets the sum of all gradients of a row of {rows[0]} in a batch, as with torch; "
                "in fit of Keras on TensorFlow it squares and clips each by itself"
            )


def build_optimizer(config: OptimizerConfig) -> keras.Optimizer:
    """Return the configured optimizer; the engine sets its learning rate before every step."""
    name = config.optimizer
    flags = {
        "sgd": {"momentum": config.momentum},
        "nesterov": {"momentum": config.momentum, "nesterov": True},
        "adamw": {"decoupled": True},
        "lars": {"momentum": config.momentum},
        "novograd": {"grad_averaging": config.grad_averaging},
    }
    return _KINDS[name](weight_decay=config.weight_decay or None, **flags.get(name, {}))
