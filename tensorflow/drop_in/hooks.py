"""Replacements for Keras functions that would drop a distributed optimizer, or its saved state, or fail with one.

Importing this module installs them. Plain optimizers behave as before.
"""

import contextlib
import functools
import gc
import inspect
import io
import itertools
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras

from allstep.tensorflow.compat import (
    build_symbolically,
    fill_legacy_optimizers,
    h5_optimizer_weights,
    is_in_xla,
    layers_of,
    wrap_configurations,
    wrap_loss_scaling,
    wrap_model_method,
    wrapper,
)
from allstep.tensorflow.drop_in.batch_norm import synchronises
from allstep.tensorflow.drop_in.first_steps import checked, is_guarded
from allstep.tensorflow.drop_in.fit_guard import guarded
from allstep.tensorflow.drop_in.optimizer import Distributed, is_distributed, parts, restore, saved_entry
from allstep.tensorflow.drop_in.replicas import refusal
from allstep.tensorflow.drop_in.saving import KEY, Undistributed, make_plain, specialise
from allstep.tensorflow.drop_in.xla import compiled_step

_num_compiled = itertools.count()
_compiled_models: weakref.WeakValueDictionary[int, keras.Model] = weakref.WeakValueDictionary()


def compiled_models() -> list[keras.Model]:
    """Return the live models that are compiled with a distributed optimizer, oldest first."""
    gc.collect()  # models are in reference cycles, which ranks would otherwise collect at different times
    models = dict.fromkeys(model for _, model in sorted(_compiled_models.items()))
    return [model for model in models if is_distributed(model.optimizer)]


def track_model(model: keras.Model) -> None:
    """Add a model to `compiled_models`."""
    _compiled_models[next(_num_compiled)] = model


@wrapper
def _compile(compile_: Callable[..., None], self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
    """Wrap `Model.compile` for distributed optimizers.

    `jit_compile="auto"`, which means XLA on a GPU, means False with a user's `train_step`, because only Keras' step can
    be split around Horovod, and with a batch norm over all ranks. `experimental_run_tf_function`, which Horovod's
    examples pass and Keras 3 has dropped, is accepted.
    """
    if not is_distributed(optimizer):
        return compile_(self, optimizer, *args, **kwargs)
    kwargs.pop("experimental_run_tf_function", None)
    call = inspect.signature(compile_).bind(self, optimizer, *args, **kwargs)
    is_split = has_keras_step(self) and not any(map(synchronises, layers_of(self)))
    if call.arguments.get("jit_compile", "auto") == "auto" and not is_split:
        call.arguments["jit_compile"] = False
    track_model(self)
    return compile_(*call.args, **call.kwargs)


@wrapper
def _fit(fit_: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Model.fit` to compare over the ranks what each is about to do and what it ends with."""
    call = inspect.signature(fit_).bind(self, *args, **kwargs)
    with guarded(self, call.arguments):
        return fit_(*call.args, **call.kwargs)


@wrapper
def _maybe_symbolic_build(build_: Callable[..., None], self: Any, iterator: Any = None, **given: Any) -> None:
    """Wrap what Keras calls before a `fit` reads a batch, to create weights that a broadcast is to send.

    A model that is built by its first batch would take the first step from other weights on each rank.
    """
    build_(self, iterator=iterator, **given)
    if iterator is None or not is_guarded() or all(layer.built for layer in layers_of(self)):
        return
    with contextlib.suppress(Exception):  # as where training takes no call of the model
        build_symbolically(self, iterator)


def has_keras_step(model: keras.Model) -> bool:
    """Return whether a model trains with Keras' `train_step`."""
    return type(model).train_step is keras.Model.train_step


@wrapper
def _make_train_function(make_train_function_: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Model.make_train_function` to refuse training with a plain optimizer that has replaced a distributed one in
    a later `compile`, and to leave XLA compilation to `train_step`."""
    if any(model is self for model in _compiled_models.values()) and (reason := refusal(self)):
        raise ValueError(reason)
    in_parts = self.jit_compile and has_keras_step(self) and is_distributed(self.optimizer)
    if not in_parts:
        return make_train_function_(self, *args, **kwargs)
    self.jit_compile = False
    try:
        return make_train_function_(self, *args, **kwargs)
    finally:
        self.jit_compile = True


@wrapper
def _train_step(train_step_: Callable[..., Any], self: Any, data: Any) -> Any:
    """Wrap `Model.train_step` to check the loss of the first batch, and to let XLA compile the parts of a step around
    Horovod instead of the whole step."""
    step, data = functools.partial(train_step_, self), checked(self, data)
    if self.jit_compile and is_distributed(self.optimizer) and not is_in_xla():
        return compiled_step(step, data)
    return step(data)


@wrapper
def _loss_scale_init(init: Callable[..., None], self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Make LossScaleOptimizer(DistributedOptimizer(x)) mean DistributedOptimizer(LossScaleOptimizer(x)).

    Keras creates the former under the mixed_float16 policy. It would check for non-finite values before gradients are
    all-reduced, so one rank could skip a step while the others wait for it.
    """
    init(self, inner_optimizer, *args, **kwargs)
    for mixin in (Distributed, Undistributed):
        if isinstance(inner_optimizer, mixin):
            attributes = {name: getattr(inner_optimizer, name) for name in mixin.__annotations__}
            make_plain(inner_optimizer)
            specialise(self, mixin, **attributes)


@wrapper
def _write_configuration(write: Callable[..., None], obj: Any, config: dict[str, Any]) -> None:
    """Wrap the writer to add how an optimizer is distributed to its configuration."""
    write(obj, config)
    if isinstance(obj, keras.optimizers.Optimizer) and (saved := saved_entry(obj)):
        config[KEY] = saved


@wrapper
def _read_configuration(make: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the reader to distribute an optimizer that is created from such a configuration."""
    obj = make(config, *args, **kwargs)
    is_ours = isinstance(config, dict) and KEY in config and isinstance(obj, keras.optimizers.Optimizer)
    if is_ours and not isinstance(obj, (Distributed, Undistributed)):  # Keras may return a shared object
        restore(obj, config[KEY])
    return obj


wrap_model_method("compile", _compile)
wrap_model_method("fit", _fit)
wrap_model_method("_maybe_symbolic_build", _maybe_symbolic_build)
wrap_model_method("make_train_function", _make_train_function)
wrap_model_method("train_step", _train_step)
wrap_configurations(_write_configuration, _read_configuration)
wrap_loss_scaling(_loss_scale_init)
fill_legacy_optimizers()  # scripts use them, since Horovod's wrapper did not support the new optimizers of Keras 2.11


_POLICY = "mixed_float16"


@contextlib.contextmanager
def policy_of_saved_optimizer(filepath: str | os.PathLike[str]) -> Iterator[None]:
    """Have Keras scale the loss of the model that it loads in the block, if the file's optimizer did.

    `compile` adds the scaling by the global policy, which the file does not hold; layers keep their own policies.
    """
    before = keras.config.dtype_policy()
    if _scales_loss(filepath):
        keras.config.set_dtype_policy(_POLICY)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _scales_loss(filepath: str | os.PathLike[str]) -> bool:
    """Return whether the file has the state of a loss scale; what is no saved model is left to Keras."""
    if zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            if "model.weights.h5" not in archive.namelist():
                return False
            with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
                return "optimizer/inner_optimizer" in file
    if h5py.is_hdf5(filepath):
        with h5py.File(filepath) as file:
            names = file["optimizer_weights"].attrs.get("weight_names", []) if "optimizer_weights" in file else []
            return any(b"dynamic_scale" in (name if isinstance(name, bytes) else name.encode()) for name in names)
    return False


def restore_h5_optimizer(model: keras.Model, filepath: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Replace the model's optimizer by one with the file's slots.

    Keras 3 builds the optimizer of an .h5 file for no variables, so it loses the slots and refuses to train.
    """
    steps = max(part.gradient_accumulation_steps or 0 for part in parts(model.optimizer))
    if steps and "backward_passes_per_step" not in options and not options.get("average_aggregated_gradients"):
        raise ValueError(
            f"expected backward_passes_per_step={steps} (the sum of the gradients) or average_aggregated_gradients="
            f"True (their mean), since {filepath} does not say; received neither. A .keras file keeps it."
        )
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        weights = h5_optimizer_weights(file)
        for variable, weight in zip(optimizer.variables, weights, strict=True):
            variable.assign(weight[()])
    model.optimizer = optimizer
