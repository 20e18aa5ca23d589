"""Models with horovod_keras on two real ranks: loaded ones stay distributed, and diverging replicas are detected.

Oracles: the saved model; the other rank's weights; numbers calculated manually.
"""

from __future__ import annotations

import numpy as np
import pytest
from keras_ranks import behaviour_of, same


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory) -> list[dict]:
    return behaviour_of(tmp_path_factory.mktemp("behaviour"), "keras_saving", "keras_replicas")


SAVED = {
    "save_keras_format": "Adam",
    "save_h5_format": "Adam",
    "save_h5_loss_scale": "LossScaleOptimizer",
    "save_plain": "Adam",
    "save_registered": "Registered",
    "save_unregistered": "Unregistered",
    "save_loss_scale": "LossScaleOptimizer",
    "save_accumulation": "Adam",
    "save_accumulated_sum": "SGD",
    "save_h5_accumulated_sum": "SGD",
}


@pytest.mark.parametrize("case", SAVED)
def test_load_model_restores_everything(behaviour, case):
    result = same(behaviour, case)  # asserts that the loaded models are in sync
    assert result["type"] == SAVED[case]
    assert result["state"] and result["config"] and result["continued"]


def test_an_h5_file_does_not_say_what_was_accumulated(behaviour):
    assert "expected backward_passes_per_step=2" in same(behaviour, "save_h5_accumulated_sum")["ambiguous"]


def test_a_saved_model_needs_no_horovod(behaviour):
    assert behaviour[0]["load_without_horovod"] is True


def test_an_optimizer_that_keras_makes_anew_stays_distributed(behaviour):
    result = same(behaviour, "stays_distributed")
    assert len(result["changes"]) == 12
    assert result["changes"] == {way: pytest.approx(-0.3, abs=1e-6) for way in result["changes"]}
    options = {"op": "sum", "compression": "fp16", "name": "mine", "sparse_as_dense": True, "lost": []}
    assert result["options"].items() >= options.items()
    assert result["plain stays plain"]


def test_an_optimizer_that_cannot_stay_distributed_does_not_train(behaviour):
    for rank in behaviour:
        result = rank["refuses_what_was_not_saved"]
        for name in ("process_set", "groups", "compression", "local variables"):
            assert "expected a DistributedOptimizer; received SGD" in result["refused"][name]
            assert f"a configuration does not hold its {name}" in result["refused"][name]
        assert "which variables are local is unknown" in result["refused"]["from_config"]
        assert "compresion" in result["refused"]["misspelt"]
        for number in range(3):
            assert "expected what allstep writes" in result["refused"][f"entry {number}"]
        assert set(result["wrapped"].values()) == {result["given"]} == {"no error"}


def test_from_config_stays_distributed(behaviour):
    """Oracle: op=Sum of the gradients 1 and 2, with learning rate 0.1."""
    np.testing.assert_allclose(same(behaviour, "from_config"), [-0.3], atol=1e-6)


def test_wrapping_keeps_state_and_exclusions(behaviour):
    result = same(behaviour, "state_survives_wrapping")
    assert result["same"] and result["callable"]
    kernel, bias = np.ravel(result["decayed"])
    # Only the kernel decays, by 0.5 * 0.1 of its value before each of the two steps.
    assert bias - kernel == pytest.approx(1 - 0.95**2, abs=0.01)


def test_broadcast_reaches_a_models_own_optimizers(behaviour):
    assert same(behaviour, "a_models_own_optimizers")["rate"] == pytest.approx(0.05)


NOT_SHARED = "ValueError: expected an optimizer that shares its gradients with the other ranks; received "
REFUSED = {
    "plain": NOT_SHARED + "SGD",
    "by name": NOT_SHARED + "Adam",
    "schedule": NOT_SHARED + "Adam",
    "best model": NOT_SHARED + "Adam",
    "none": "ValueError: expected a model with an optimizer",
    "one of two": NOT_SHARED + "SGD",
    "recompiled": NOT_SHARED + "SGD",
    "recompiled, batch by batch": NOT_SHARED + "SGD",
}


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_that_is_not_distributed_is_refused_at_the_start(behaviour, model):
    for rank in behaviour:
        assert rank["refused_at_the_start"][model].startswith(REFUSED[model])


def test_all_ranks_refuse_what_one_refuses(behaviour):
    first, second = (rank["refused_at_the_start"]["on one rank"] for rank in behaviour)
    assert first.startswith(NOT_SHARED + "SGD")
    assert "another rank has refused" in second


def test_what_does_not_train_or_averages_by_itself_is_not_refused(behaviour):
    same(behaviour, "not_refused")


FOUND = {
    "weights": ("after epoch 1", "logits/kernel"),
    "slots": ("after batch 1", "sequential"),
    "learning rate": ("after batch 1", "learning_rate"),
    "iterations": ("after batch 1", "iteration."),
    "embedding": ("after batch 1", "words/embeddings"),
    "own step": ("after batch 1", "hidden/kernel"),
    "second optimizer": ("after epoch 1", "logits"),
    "no broadcast": ("after batch 1", "hidden/kernel"),
}


@pytest.mark.parametrize("change", FOUND)
def test_replicas_that_part_are_found(behaviour, change):
    moment, first = FOUND[change]
    message = behaviour[0]["found_after_an_epoch"][change]
    assert message.startswith("RuntimeError: expected the same weights and optimizer state on all ranks " + moment)
    assert "received others on rank 1 than on rank 0" in message and first in message.partition("Start with")[0]
    assert behaviour[1]["found_after_an_epoch"][change].startswith("RuntimeError")


def test_rows_in_another_order_are_not_another_embedding(behaviour):
    assert same(behaviour, "found_after_an_epoch")["embedding, by rounding"] == "no error"


def test_each_epoch_of_each_fit_is_compared(behaviour):
    moments = [message.partition(" on all ranks ")[2][:13] for message in same(behaviour, "found_in_each_fit")]
    assert moments == ["after epoch 2", "after batch 1", "after batch 1"]


def test_what_is_each_ranks_own_is_left_alone(behaviour):
    mine, other = (rank["each_ranks_own"] for rank in behaviour)
    assert mine["shared"] == other["shared"]
    for name, values in mine["own"].items():
        assert values != other["own"][name]


def test_a_step_before_the_state_is_sent_is_not_compared(behaviour):
    """Horovod's elastic example builds the optimizer so; each rank keeps its random stream."""
    first, second = (rank["state_sent_after_one_step"] for rank in behaviour)
    assert first["state"] == second["state"]
    assert first["seed"] != second["seed"]
    for rank in (first, second):
        assert rank["errors"][:2] == ["no error", "no error"]
        assert "after batch 1" in rank["errors"][2]
