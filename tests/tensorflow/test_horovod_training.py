"""Gradients, broadcasts and callbacks with horovod_keras on two real ranks.

Oracles: the other rank's weights; numbers calculated manually.
"""

from __future__ import annotations

import numpy as np
import pytest
from keras_ranks import behaviour_of, same


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory) -> list[dict]:
    return behaviour_of(
        tmp_path_factory.mktemp("behaviour"), "keras_gradients", "keras_xla", "keras_broadcasts", "keras_callbacks"
    )


def test_custom_loop_is_in_step_with_one_collective(behaviour):
    assert len(same(behaviour, "custom_loop")["collectives"]) == 1


def test_loops_without_a_broadcast_end(behaviour):
    assert same(behaviour, "loops_without_a_broadcast") == [True, True]


def test_horovods_own_wrapper_is_out_of_step(behaviour):
    """If this fails, Horovod supports Keras 3, and horovod_keras can be removed."""
    mine, other = (rank["horovods_own_wrapper"] for rank in behaviour)
    assert mine != other


def test_ranks_with_other_names_meet(behaviour):
    mine, other = (rank["optimizer_without_horovod_name"] for rank in behaviour)
    assert mine["name"] != other["name"]
    assert mine["weights"] == other["weights"]


@pytest.mark.parametrize(
    ("case", "initial_scale", "iterations"),
    [
        ("non_finite_inside", 8.0, 3),
        ("non_finite_outside", 8.0, 3),
        ("non_finite_with_accumulation", 8.0, 1),  # three finite batches are one step of two batches
        ("mixed_float16", 2.0**15, 3),
    ],
)
def test_one_ranks_nan_is_every_ranks(behaviour, case, initial_scale, iterations):
    result = same(behaviour, case)
    assert result["scale"] == initial_scale / 2
    assert result["iterations"] == iterations
    assert result["types"] == ["LossScaleOptimizer", "SGD"]
    assert all(np.isfinite(weight).all() for weight in result["weights"])


def test_process_sets(behaviour):
    for rank in behaviour:
        # A rank that is the only one in its set, or outside of the set, trains like a single process.
        assert rank["process_sets"]["mine"] == rank["process_sets"]["plain"] == rank["process_sets"]["others"]


def test_local_layer_keeps_its_own_gradient(behaviour):
    """Gradients are rank + 1, and the learning rate is 0.1; local gradients are divided by the 2 ranks."""
    for rank, result in enumerate(behaviour):
        change = result["local_layer"]["change"]
        np.testing.assert_allclose(change, [-0.15, -0.15, -0.05 * (rank + 1), -0.05 * (rank + 1)], atol=1e-6)
        assert "global_clipnorm" in result["local_layer"]["refused"]


def test_listed_groups(behaviour):
    result = same(behaviour, "listed_groups")
    np.testing.assert_allclose(result["change"], [-0.15] * 4, atol=1e-6)
    assert result["sizes"] == [2, 1, 1]


def test_multi_optimizer_is_in_step(behaviour):
    assert "already a DistributedOptimizer" in same(behaviour, "multi_optimizer")["twice"]


def test_optimizers_of_the_same_shapes_may_step_at_once(behaviour):
    assert all(same(behaviour, "same_shapes_at_once").values())


def test_sparse_as_dense_on_one_rank(behaviour):
    assert same(behaviour, "sparse_as_dense") < 1e-5


def test_adasum(behaviour):
    """Oracle: Maleki et al. 2020: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b for a = (1, 2), b = (3, -1)."""
    np.testing.assert_allclose(same(behaviour, "adasum"), [-3.75, -0.85], atol=1e-6)


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("twice", "ValueError", "already a DistributedOptimizer"),
        ("not an optimizer", "ValueError", "Received: 'sgd'"),
        ("op", "ValueError", "op=3"),
        ("predivide", "ValueError", "gradient_predivide_factor"),
        ("groups", "ValueError", "Received: 0"),
        ("passes", "ValueError", "Received: 0"),
        ("passes twice", "ValueError", "gradient_accumulation_steps"),
        ("passes after build", "ValueError", "before the optimizer is built"),
        ("unknown option", "TypeError", "compresion"),
        ("xla", "NotImplementedError", "apply them outside of it"),
        ("stateless", "ValueError", "stateless_apply"),
        ("legacy", "ValueError", "legacy_opts"),
        ("global variables", "RuntimeError", "broadcast_variables(model.weights, root_rank)"),
        ("global variables differ", "RuntimeError", "on every rank"),
    ],
)
def test_refuses(behaviour, what, error, says):
    message = same(behaviour, "refusals")[what]
    assert message.startswith(error)
    assert says in message


def test_fit_by_xla(behaviour):
    """Fit with sample weights, a smaller last batch, a metric and two steps per call. Oracle: the same without XLA."""
    result = same(behaviour, "fit_by_xla")
    assert result["is_inside"] == {"without": [False], "with": [True], "loaded": [True], "eagerly": []}
    for name in ("with", "loaded", "eagerly"):
        np.testing.assert_allclose(result["history"][name], result["history"]["without"], rtol=1e-5)
        for array, oracle in zip(result["weights"][name], result["weights"]["without"], strict=True):
            np.testing.assert_allclose(array, oracle, rtol=0, atol=1e-6)


def test_a_step_of_the_users_own_is_told_what_to_do(behaviour):
    message = same(behaviour, "xla_of_a_whole_step")
    assert message.startswith("NotImplementedError: expected Horovod's operations outside of what XLA compiles")
    assert "with a `train_step` of your own with jit_compile=False" in message and "\n" not in message.strip()


def test_where_keras_would_choose_xla(behaviour):
    """Keras chooses XLA as on a GPU, but not for a user's `train_step`, which would be compiled as a whole."""
    assert same(behaviour, "xla_where_keras_chooses") == [True, False]


def test_a_refused_optimizer_stays_plain(behaviour):
    assert same(behaviour, "refusals")["still plain"]


def test_compile_takes_what_horovods_examples_pass(behaviour):
    result = same(behaviour, "compile_options")
    assert result["legacy"] == [True, True]
    assert "experimental_run_tf_function" in result["other"], "plain optimizers are none of our business"


def test_broadcast_variables(behaviour):
    result = same(behaviour, "broadcast_variables")
    assert result["native"] == [1.0 if dtype == 7 else 2.0 for dtype in range(11)]  # the 8th is bool
    assert result["model"] and result["inside"] == 5.0


def test_broadcast_global_variables(behaviour):
    result = same(behaviour, "broadcast_global_variables")
    assert result["weights"]
    assert result["learning_rate"] == pytest.approx(0.2)


def test_broadcast_from_a_rank_that_alone_has_loaded(behaviour):
    assert same(behaviour, "broadcast_loaded_model")["iterations"] == 4


def test_broadcast_leaves_a_gradient_in_the_making(behaviour):
    assert same(behaviour, "broadcast_leaves_a_gradient_in_the_making") < 1e-6


def test_broadcast_leaves_local_variables(behaviour):
    assert all(rank["broadcast_keeps_local_variables"]["kept"] for rank in behaviour)
    assert behaviour[0]["broadcast_keeps_local_variables"] == behaviour[1]["broadcast_keeps_local_variables"]


def test_collectives(behaviour):
    for rank, result in enumerate(behaviour):
        assert result["collectives"] == {
            "average": 0.5,
            "sum": [1.0, 2.0],
            "variable": 0.5,
            "allgather": [0, 1, 1],
            "broadcast": [1, 7],
            "reducescatter": [3.0 * (rank + 1)],
            "object": {"rank": 1},
            "built": True,
        }


def test_metrics_are_averaged_for_the_callbacks_after(behaviour):
    result = [rank["metric_average"] for rank in behaviour]
    for name, value in result[0]["after"][0].items():
        assert value == pytest.approx((result[0]["before"][0][name] + result[1]["before"][0][name]) / 2, abs=1e-6)
        assert result[0]["before"][0][name] != result[1]["before"][0][name]
    assert result[0]["after"] == result[1]["after"]
    assert result[0]["history"] == result[0]["after"][0]


def test_warmup_rises_from_one_ranks_learning_rate(behaviour):
    """Oracle: Goyal et al. 2017: from 0.4 / 2 ranks to 0.4 in 2 epochs of 4 batches, then constant."""
    result = same(behaviour, "warmup")
    expected = [0.2 + 0.2 * (step + 1) / 8 for step in range(8)] + [0.4] * 4
    np.testing.assert_allclose(result["rates"], expected, atol=1e-6)
    np.testing.assert_allclose(result["lr"], [0.3, 0.4, 0.4], atol=1e-6)


def test_schedule(behaviour):
    result = same(behaviour, "schedule")
    np.testing.assert_allclose(result["staircase"], [1.0, 0.5], atol=1e-6)
    np.testing.assert_allclose(result["smooth"], [1.0, 1.25, 1.5, 1.75], atol=1e-6)
    np.testing.assert_allclose(result["late"], [1.0, 0.1], atol=1e-6)
    assert "steps_per_epoch" in result["unknown"]


def test_momentum_correction(behaviour):
    """Oracle: steps of -1 and 0.5 * velocity - 0.1; the correction shrinks the velocity from -1 to -0.1."""
    result = same(behaviour, "momentum_correction")
    assert result["True"] == pytest.approx(-1 - 0.15, abs=1e-6)
    assert result["False"] == pytest.approx(-1 - 0.6, abs=1e-6)


def test_best_model_checkpoint_is_written_by_rank_0_alone(behaviour):
    assert [rank["best_model_checkpoint"]["written"] for rank in behaviour] == [[True, True], [False, False]]
    assert "no `filepath`" in behaviour[0]["best_model_checkpoint"]["refused"]
