"""Parts of the drop-in that need no ranks: refusals of `init`, the stall limit, and saved loss scales.

Oracles: plain Keras; the exact line.
"""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from allstep.common.base.errors import Fault, UserError
from allstep.common.launch.placement import ALONE, Placement
from allstep.tensorflow import horovod_keras as hvd
from allstep.tensorflow.drop_in import stalls
from allstep.tensorflow.drop_in.collectives import per_rank
from allstep.tensorflow.drop_in.first_steps import has_mean_loss

TWO_RANKS = Placement("mpirun", 0, 2, 0, 2, 0, ("host",))
LIMIT, WARNING = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "expected a rank, a number of ranks and a local rank from the launcher"),
        ({"PMIX_RANK": "0"}, "received PMIX_RANK=.*; start the job by horovodrun, mpirun or srun, or unset them"),
        ({"SLURM_NTASKS": "4"}, "start them by srun or horovodrun, or unset SLURM_NTASKS to train alone"),
    ],
)
def test_init_refuses_ranks_that_no_launcher_describes(variables, says, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        hvd.init()


def test_init_refuses_a_launcher_of_another_mpi(monkeypatch):
    """MPICH's mpiexec says two ranks, and Horovod, built with Open MPI or alone with Gloo, sees one."""
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    for name, value in {**variables, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(LIMIT, "0")
    try:
        with pytest.raises(Fault, match="mpiexec says 2 ranks, Horovod sees 1; they would train independently"):
            hvd.init()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(
    ("seconds", "given", "limit", "warning"),
    [(600, {}, "600", "60"), (10, {}, "10", "5"), (600, {LIMIT: "8"}, "8", "4"), (1, {WARNING: "7"}, "1", "7")],
)
def test_the_stall_limit_is_set_and_told(seconds, given, limit, warning, monkeypatch, capsys):
    for name in (LIMIT, WARNING):
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is undone
        if name not in given:
            del os.environ[name]
    registered = []
    monkeypatch.setattr(stalls.faulthandler, "register", lambda number, **_: registered.append(number))
    stalls.limit_stalls(TWO_RANKS, seconds)
    assert (os.environ[LIMIT], os.environ[WARNING]) == (limit, warning)
    assert registered in ([signal.SIGTERM], [])  # pytest's stderr may have no descriptor
    assert (
        f"waits for another for {limit} s ends the job; change it by hvd.init(stall_timeout" in capsys.readouterr().err
    )
    monkeypatch.delenv(LIMIT), monkeypatch.delenv(WARNING)


def test_no_stall_limit_where_it_is_not_wanted(monkeypatch, capsys):
    monkeypatch.delenv(LIMIT, raising=False)
    stalls.limit_stalls(ALONE, 600)
    assert LIMIT not in os.environ
    monkeypatch.setenv(LIMIT, "0")
    stalls.limit_stalls(TWO_RANKS, 600)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="stall_timeout must be a whole number of seconds from 0 to 1000000, got -1"):
        stalls.limit_stalls(TWO_RANKS, -1)


def test_values_of_ranks_are_told_together():
    assert per_rank([10, 11, 11]) == "10 on rank 0, 11 on ranks 1 and 2"
    assert per_rank([3, 4], [1, 5]) == "3 on rank 1, 4 on rank 5"
    assert per_rank([1] * 6 + [2]) == "1 on 6 ranks from 0 to 5, 2 on rank 6"


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_loaded_model_scales_its_loss_again(suffix, tmp_path):
    """The file does not hold the global policy, by which `compile` scales the loss. Oracle: the saved optimizer."""
    x, y = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)
    hvd.init()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="mixed_float16")])
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), keras.losses.MeanSquaredError()
        )
        model.fit(x, y, verbose=0)
        model.save(tmp_path / f"model{suffix}")
    finally:
        keras.config.set_dtype_policy("float32")
    loaded = hvd.load_model(tmp_path / f"model{suffix}")
    assert keras.config.dtype_policy().name == "float32"
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    values = [[variable.numpy() for variable in one.optimizer.variables] for one in (model, loaded)]
    for mine, saved in zip(*values, strict=True):
        np.testing.assert_array_equal(mine, saved)


@pytest.mark.parametrize(("reduction", "is_mean"), [("sum_over_batch_size", True), ("sum", False)])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
def test_a_loss_of_probabilities_is_a_mean(activation, reduction, is_mean):
    """Keras computes the loss of probabilities from what comes before the activation."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=activation)])
    kind = keras.losses.BinaryCrossentropy if activation == "sigmoid" else keras.losses.CategoricalCrossentropy
    model.compile("sgd", kind(from_logits=not activation, reduction=reduction))
    samples = [tf.constant(np.random.default_rng(0).random((8, 3), np.float32)), tf.one_hot(np.arange(8) % 2, 2)]
    assert has_mean_loss(model, (True, True), samples, 8) is is_mean


class Adds(keras.layers.Layer):
    def __init__(self, added):
        super().__init__()
        self.added = added

    def call(self, inputs):
        self.add_loss(self.added(keras.ops.softmax(inputs)))
        return inputs


class Draws(keras.layers.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))


@pytest.mark.parametrize(
    ("layer", "is_mean"),
    [
        (Adds(lambda shares: keras.ops.mean(keras.ops.square(shares))), True),
        (Adds(lambda shares: keras.ops.sum(keras.ops.square(shares))), False),
        (Adds(lambda shares: keras.ops.sum(keras.ops.square(keras.ops.mean(shares, 0)))), False),  # balances experts
        (keras.layers.Lambda(lambda inputs: inputs - keras.ops.mean(inputs, 0)), False),
        (keras.layers.BatchNormalization(), True),
        (Draws(), True),
    ],
    ids=["mean", "sum", "square of a mean", "centred", "batch norm", "noise"],
)
def test_samples_that_are_compared_are_told(layer, is_mean):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), layer, keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    samples = [tf.constant(np.random.default_rng(0).random((8, 3), np.float32)), tf.one_hot(np.arange(8) % 2, 2)]
    assert has_mean_loss(model, (True, True), samples, 8) is is_mean
