"""Keras scripts in the styles that users write, with the drop-in on two real ranks.

Oracle: plain Keras in one process with the whole batch, run by the same script; the line that refuses a script.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from ranks import REPOSITORY, launch

LEAN = REPOSITORY / "tests" / "tensorflow" / "ranks" / "lean.py"
PROGRAMS = Path(__file__).parent / "programs"

TRAINS = [
    *("sequential_on_arrays", "functional_with_two_inputs_and_outputs", "subclassed_and_built_by_fit"),
    *("built_in_part_before_fit", "never_called_itself", "state_from_batch_to_batch"),
    *("tf_data_in_shards_with_repeat", "generator_with_steps_per_epoch", "data_of_unknown_length", "py_dataset"),
    *("gradient_tape_loop", "own_train_step", "batch_by_batch", "class_weights", "frozen_backbone", "lora"),
    *("regularizers_and_add_loss", "losses_that_layers_add_alone"),
    *("batch_norm_over_all_ranks", "batch_norm_of_masked_samples", "batch_norm_eagerly"),
    *("normalization_adapted_by_each_rank", "normalization_in_a_model_in_a_model", "own_layer_with_the_same_constants"),
    *("early_stopping_on_averages", "lower_rate_on_a_plateau", "rate_of_each_epoch"),
    *("warmup_with_many_steps_an_execution", "backup_on_the_first_rank", "files_on_the_first_rank"),
    *("metrics_of_one_value_a_class_and_words", "nan_on_one_rank", "own_callback_that_stops_one_rank"),
    *("validation_of_unequal_length", "averages_of_weights_swapped_in", "accumulates_clips_and_averages"),
    *("loss_weight_in_a_variable", "weights_and_momentum_set_by_callbacks"),
    *("early_stopping_on_one_ranks_value", "custom_layer_that_counts", "loss_that_is_a_sum", "sparse_inputs"),
]
TOLERANCES = {"early_stopping_on_averages": 1e-3}  # its learning rate is so high that training gets worse

FAILS = {
    "ten_and_eleven_batches": "number of batches an epoch on all ranks; received 10 on rank 0, 11 on rank 1; give all",
    "no_callbacks_at_all": "received 10 on rank 0, 11 on rank 1",
    "shards_of_unequal_length": "received 4 on rank 0, 3 on rank 1",
    "lengths_that_no_rank_knows": "batches on all ranks in epoch 1; received 6 on rank 0, 5 on rank 1; give all ranks",
    "unknown_lengths_of_an_embedding": "batches on all ranks in epoch 1; received 5 on rank 0, 6 on rank 1; give all",
    "data_that_runs_out_before_steps_per_epoch": "in epoch 1; received 5 on rank 0, 4 on rank 1",
    "other_steps_per_epoch": "received 3 on rank 0, 4 on rank 1",
    "other_epochs": "same number of epochs on all ranks; received 2 on rank 0, 3 on rank 1; pass the same",
    "other_initial_epoch": "same initial_epoch on all ranks; received 0 on rank 0, 1 on rank 1",
    "other_steps_per_execution": "same steps_per_execution on all ranks; received 1 on rank 0, 2 on rank 1",
    "class_weights_of_each_rank": "same class_weight on all ranks; received {0: 1.0, 1: 1.0, 2: 1.0} on rank 0",
    "validation_on_one_rank": "validation data in fit on all ranks; received every 1 epochs on rank 0, none on rank 1",
    "classes_of_each_rank": "weights that train on all ranks; received 4 with 43 numbers on rank 0, 4 with 37 numbers",
    "frozen_on_one_rank": "weights that train on all ranks; received 4 with 43 numbers on rank 0, 2 with 18 numbers on",
    "early_stopping_on_one_rank": "MetricAverageCallback, EarlyStopping on rank 0, BroadcastGlobalVariablesCallback, "
    "MetricAverageCallback on rank 1; give all ranks the same ones",
    "averages_on_one_rank": "MetricAverageCallback on rank 0, BroadcastGlobalVariablesCallback on rank 1",
    "metrics_of_one_rank": "received extra, loss on rank 0, loss on rank 1; give all ranks the same metrics",
    "backup_without_a_broadcast": "go on with the same epoch; received 1 on rank 0, 0 on rank 1; give BackupAndRestore",
    "files_on_all_ranks": "log.csv; received several, which would overwrite each other's; give ModelCheckpoint, Backup",
    "weights_without_a_broadcast": "all ranks after batch 1; received others on rank 1 than on rank 0, first in",
    "best_weights_of_each_rank": "all ranks at the end of fit; received others on rank 1 than on rank 0, first in",
    "bins_of_each_rank": "at the start of fit; received another `bin_boundaries` of Discretization",
    "salt_of_each_rank": "received another `salt` of Hashing",
    "scale_of_each_rank": "received another `scale` of Rescaling",
    "words_of_each_rank": "received another `vocabulary` of StringLookup",
    "custom_layer_that_follows_samples": "after batch 1; received others on rank 1 than on rank 0, first in sequential",
    "own_layer_with_constants_of_each_rank": "received another `mean` of Standardise",
    "features_that_each_rank_draws": "received another `used` of Tree",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[list[dict], str]:
    """Run all scripts in one job, and return the results of the ranks and what they printed."""
    directory = tmp_path_factory.mktemp("scripts")
    result = launch("horovodrun-gloo", 2, LEAN, PROGRAMS / "run_keras_scripts.py", directory, TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)], result.output


def test_every_script_is_tested(job):
    [results, _], output = job
    assert "the loss of this model is not tried on a part of a batch" not in output
    assert sorted({name.partition("/")[0] for name in results} - {"goes_on_after_all_that"}) == sorted(
        [*TRAINS, *FAILS]
    )


@pytest.mark.parametrize("name", TRAINS)
def test_trains_as_plain_keras_with_the_whole_batch(job, name):
    results, _ = job
    [oracle] = [rank[f"{name}/oracle"] for rank in results if f"{name}/oracle" in rank]
    for rank in results:
        assert rank[name].keys() == oracle.keys(), rank[name]
        for what, expected in oracle.items():
            same(rank[name][what], expected, TOLERANCES.get(name, 2e-6))


def same(received, expected, tolerance: float) -> None:
    if isinstance(expected, list) and any(isinstance(one, (list, str)) for one in expected):
        assert len(received) == len(expected)
        for one, other in zip(received, expected, strict=True):
            same(one, other, tolerance)
    elif isinstance(expected, str):
        assert received == expected
    else:
        np.testing.assert_allclose(received, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAILS)
def test_all_ranks_end_with_the_line(job, name):
    for rank in job[0]:
        message = rank[name]["error"]
        assert FAILS[name] in message
        assert "\n" not in message


def test_ranks_are_in_step_after_all_that(job):
    for rank in job[0]:
        assert rank["goes_on_after_all_that"] == {"weights": [0.0]}


def test_stops_are_told(job):
    results, output = job
    assert "allstep: all ranks stop after batch 2 of epoch 1, as callbacks of rank 0 ask" in output
    assert "put MetricAverageCallback before EarlyStopping, so that all decide alike" in output
    assert 1 < results[0]["early_stopping_on_averages"]["epochs"] < 8


def test_one_step_an_execution_is_told(job):
    assert "runs one step per execution in place of 4, since LearningRateWarmupCallback sets" in job[1]


def test_averages_other_than_of_the_whole_batch_are_told(job):
    assert job[1].count("an epoch has 48 on rank 0, 47 on rank 1 samples; ranks count equally in each batch") == 1
    assert job[1].count("validation has 20 on rank 0, 12 on rank 1 samples or batches; ranks count equally") == 1
    assert job[1].count("the loss of this model is not a mean over samples (but a sum, or has a mask") == 2


def test_the_stall_limit_is_told(job):
    assert job[1].count("allstep: a rank that waits for another for 600 s ends the job; change it by hvd.init(") == 1


def test_what_no_check_foresees_ends_with_both_stacks():
    """Rank 0 ends by Horovod's limit where it waits; rank 1, which the launcher then ends, prints where it stands."""
    result = launch(
        "horovodrun-gloo",
        2,
        *(LEAN, PROGRAMS / "keras_stall.py"),
        TF_CPP_MIN_LOG_LEVEL="2",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4",
    )
    assert result.returncode != 0
    assert "allstep: a rank that waits for another for 4 s ends the job" in result.output
    assert "Horovod has been shut down" in result.output
    assert re.search(r'\[1\].*keras_stall.py", line 16 in on_train_batch_begin', result.output)
