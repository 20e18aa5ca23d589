"""Internals of Keras and TensorFlow behave as `tensorflow/compat.py` expects. Oracle: the libraries."""

from __future__ import annotations

import pickle
import resource
import sys
import threading
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.saving import serialization_lib
from ranks import run

from allstep.tensorflow import compat

pytestmark = pytest.mark.cold


def made_model(optimizer: keras.Optimizer) -> keras.Model:
    """Return a small model that has been trained for one step."""
    inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)], name="inner")
    model = keras.Sequential([keras.Input((4,)), inner])
    model.compile(optimizer, "mse", jit_compile=False)
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 2)))
    return model


@pytest.mark.parametrize("jit_compile", [True, False])
def test_xla_is_known_while_a_function_is_traced(jit_compile):
    answers = []
    tf.function(lambda: answers.append(compat.is_in_xla()), jit_compile=jit_compile)()
    assert set(answers) == {jit_compile}
    assert not compat.is_in_xla()


@pytest.mark.parametrize("wrap", [tf.function, lambda function: function])
def test_a_momentary_variable_is_new_each_time_and_leaves_no_memory(wrap):
    @wrap
    def doubled(value):
        handle = compat.momentary_variable(value)
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)
        return tf.reduce_max(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    value = tf.ones(2**22)
    before = resident()
    assert [doubled(value).numpy() for _ in range(50)] == [2] * 50
    assert resident() - before < 25 * 4 * 2**22  # bytes; a leak would leave 50 variables


def test_an_optimizer_knows_its_variables_in_order():
    model = made_model(optimizer := keras.optimizers.RMSprop(0.1, momentum=0.5))
    assert [id(v) for v in compat.trained_variables(optimizer)] == [id(v) for v in model.trainable_variables]
    for position, variable in enumerate(model.trainable_variables):
        assert compat.variable_index(optimizer, variable) == position
        assert compat.variable_index(optimizer, variable.value) == position  # which a custom update_step receives
    assert [v.shape for v in compat.rmsprop_momentums(optimizer)] == [v.shape for v in model.trainable_variables]
    assert all(np.any(v.numpy()) for v in compat.rmsprop_momentums(optimizer))


def test_gradients_are_accumulated_where_they_are_looked_for():
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    made_model(accumulating)
    assert [bool(np.any(v.numpy())) for v in compat.accumulated_gradients(accumulating)] == [True] * 4
    plain = keras.optimizers.SGD(0.1)
    made_model(plain)
    assert compat.accumulated_gradients(plain) == []


def test_accumulated_gradients_pass_through_clipping_as_their_mean():
    seen = []

    class Optimizer(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            seen.append([g.numpy().tolist() for g in grads])
            return super()._clip_gradients(grads)

    optimizer = Optimizer(0.1, gradient_accumulation_steps=2)
    variable = keras.Variable([0.0])
    for gradient in (1.0, 3.0):
        optimizer.apply([tf.constant([gradient])], [variable])
    assert seen[-1] == [[2.0]]


def test_layers_are_found_at_any_depth():
    model = made_model(keras.optimizers.SGD())
    dense = [layer for layer in compat.layers_of(model) if isinstance(layer, keras.layers.Dense)]
    assert len(dense) == 2 and model in list(compat.layers_of(model))


class ByCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.calls, self.dense = [], keras.layers.Dense(2)

    def call(self, inputs, training=False):
        self.calls.append(training)
        return self.dense(inputs)


def test_a_model_is_built_by_the_shapes_of_its_batches():
    """Keras calls a model once more to build it, unless it is built already."""
    plain, early = ByCall(), ByCall()
    batches = TFEpochIterator(x=np.ones((4, 3)), batch_size=2, distribute_strategy=tf.distribute.get_strategy())
    compat.build_symbolically(early, batches)
    assert early.dense.kernel.shape == (3, 2)
    for model in (plain, early):
        model(np.ones((2, 3), np.float32), training=True)
    assert list(early.calls) == list(plain.calls)


def test_another_thread_has_another_seed_generator_until_it_takes_one():
    generator, seen = compat.global_seed_generator(), []

    def look():
        seen.append(compat.global_seed_generator() is generator)
        compat.take_seed_generator(generator)
        seen.append(compat.global_seed_generator() is generator)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False, True]


def test_layers_of_a_remat_scope_are_known():
    plain = keras.layers.Dense(1)
    with keras.RematScope(mode="full"):
        assert compat.is_recomputed(keras.layers.Dense(1))
    assert not compat.is_recomputed(plain)


def test_an_object_of_a_changed_class_is_pickled_as_one_of_its_own():
    plain = keras.optimizers.SGD

    def reduce(self):
        return compat.pickled_as(plain, super(changed, self).__reduce__())

    changed = type("SGD", (plain,), {"__module__": "keras.optimizers", "__reduce__": reduce})
    made_model(optimizer := changed(0.25))
    assert type(again := pickle.loads(pickle.dumps(optimizer))) is plain
    assert float(again.learning_rate) == 0.25


def test_slots_are_read_from_an_h5_file(tmp_path):
    model = made_model(optimizer := keras.optimizers.SGD(0.1, momentum=0.5))
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        received = [weight[()] for weight in compat.h5_optimizer_weights(file)]
    assert len(received) == len(optimizer.variables) == 6
    for value, variable in zip(received, optimizer.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def test_both_functions_of_configurations_are_where_they_are_replaced():
    read = serialization_lib.deserialize_keras_object
    importers = {name for name, module in sys.modules.items() if vars(module).get("deserialize_keras_object") is read}
    assert {"keras.src.saving.serialization_lib", "keras.src.saving.saving_lib", "keras.saving"} <= importers
    assert callable(serialization_lib.get_build_and_compile_config)


# Run in a separate process, because the replacements are permanent.
PROGRAM = """
import sys, keras
assert {"sklearn", "scipy", "matplotlib"} & sys.modules.keys()  # else remove `without_unused_libraries`
try:
    keras.optimizers.legacy.Adam(0.1)
    raise AssertionError("`fill_legacy_optimizers` can go")
except ImportError as error:
    assert "keras.optimizers.legacy" in str(error)

import functools, numpy as np
from allstep.tensorflow import compat
from collections import Counter

called = Counter()

def counted(name):
    def wrap(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            called[name] += 1
            return function(*args, **kwargs)
        return wrapped
    return wrap

def calls(name, function):
    before = called[name]
    result = function()
    assert called[name] > before, name
    return result

compat.wrap_model_method("compile", counted("compile"))
compat.wrap_model_method("make_train_function", counted("make_train_function"))
compat.wrap_configurations(counted("write"), counted("read"))
compat.wrap_loss_scaling(counted("scale"))
compat.fill_legacy_optimizers()

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
    def call(self, values):
        return self.dense(values)

images, targets = np.ones((2, 4)), np.ones((2, 2))
for model in (keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), Own()):
    calls("compile", lambda: model.compile("sgd", "mse", jit_compile=False))
    calls("make_train_function", lambda: model.fit(images, targets, verbose=0))
    calls("make_train_function", lambda: model.train_on_batch(images, targets))
saved = calls("write", lambda: keras.optimizers.serialize(keras.optimizers.SGD(0.5)))
assert calls("read", lambda: keras.optimizers.deserialize(saved)).learning_rate == 0.5
calls("read", lambda: keras.layers.deserialize(calls("write", lambda: keras.layers.serialize(keras.layers.Dense(2)))))
keras.config.set_dtype_policy("mixed_float16")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
calls("scale", lambda: model.compile("sgd", "mse"))
assert isinstance(keras.optimizers.legacy.Adam(0.1), keras.optimizers.Adam)
"""


def test_keras_calls_what_stands_in_place_of_its_functions_and_needs_it():
    result = run(sys.executable, "-c", PROGRAM)
    assert result.returncode == 0, result.stderr
