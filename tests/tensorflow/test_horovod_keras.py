"""The drop-in for Horovod's Keras API, on two real ranks.

Oracles: plain Keras in one process with the whole batch; the other rank's weights; numbers worked out by hand.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ranks import REPOSITORY, launch  # noqa: E402
from ranks import run as run_command  # noqa: E402

SCRIPTS = Path(__file__).parent / "ranks"


def run(launcher: str, script: Path, directory: Path) -> Path:
    result = launch(launcher, 2, script, directory, TF_CPP_MIN_LOG_LEVEL="2", timeout=600)
    assert result.returncode == 0, result.output
    return directory


@pytest.fixture(scope="module")
def numerics(tmp_path_factory) -> list[dict[str, list[np.ndarray]]]:
    """For each rank: the arrays of each case after training; the third entry holds the oracles."""
    directory = run("horovodrun-gloo", SCRIPTS / "keras_numerics.py", tmp_path_factory.mktemp("numerics"))
    results = [{}, {}, {}]
    for rank in range(2):
        arrays = np.load(directory / f"rank{rank}.npz")
        for key in arrays:
            case, *oracle, _ = key.split("/")
            results[2 if oracle else rank].setdefault(case, []).append(arrays[key])
    return results


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory) -> list[dict]:
    directory = run("horovodrun-mpi", SCRIPTS / "keras_behaviour.py", tmp_path_factory.mktemp("behaviour"))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


# What is smaller than float32's rounding over 12 steps in two orders of summation, or the rounding of 16 bits.
TOLERANCES = {"fp16": 1e-4, "fp16_embedding": 1e-4, "bfloat16": 1e-2}
# The oracle has another learning rate, which is the optimizer's state: compare the weights alone.
WEIGHTS_ALONE = {"passes_summed": 4, "sum": 4, "loss_scale_accumulation": 4}
CASES = [
    *("sgd", "nesterov", "adam", "adam_schedule", "weight_decay", "muon"),
    *("clipnorm", "clipvalue", "global_clipnorm", "constraint", "ema", "ema_overwrite"),
    *("accumulation", "accumulation_eager", "accumulation_embedding", "passes_averaged", "passes_summed"),
    *("loss_scale_factor", "loss_scale_inside", "loss_scale_outside", "loss_scale_accumulation"),
    *("embedding", "embedding_clipnorm", "embedding_as_dense", "embedding_predivide"),
    *("unused_layer", "unused_layer_accumulation", "eager", "custom_training_step"),
    *("sum", "fp16", "fp16_embedding", "bfloat16", "predivide", "devices"),
    *("two_groups", "more_groups_than_gradients"),
    *("xla", "xla_accumulation", "xla_loss_scale", "xla_embedding"),
]


def test_every_case_is_tested(numerics):
    assert all(sorted(results) == sorted(CASES) for results in numerics)


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_the_same_bits(numerics, case):
    for mine, other in zip(numerics[0][case], numerics[1][case], strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_with_the_whole_batch(numerics, case):
    trained, expected = numerics[0][case], numerics[2][case]
    assert len(trained) == len(expected)
    for array, oracle in list(zip(trained, expected, strict=True))[: WEIGHTS_ALONE.get(case)]:
        np.testing.assert_allclose(array, oracle, rtol=0, atol=TOLERANCES.get(case, 1e-6))


def same(behaviour: list[dict], case: str):
    """The result of a case, the same on both ranks."""
    assert behaviour[0][case] == behaviour[1][case]
    return behaviour[0][case]


def test_custom_loop_is_in_step_with_one_collective(behaviour):
    assert len(same(behaviour, "custom_loop")["collectives"]) == 1


def test_horovods_own_wrapper_is_out_of_step(behaviour):
    """If this fails, Horovod has learned Keras 3 and this module may go."""
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
        ("non_finite_with_accumulation", 8.0, 1),  # three finite batches make one step of two
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
        # Alone in one's set, or outside the set: a single process.
        assert rank["process_sets"]["mine"] == rank["process_sets"]["plain"] == rank["process_sets"]["others"]


def test_local_layer_keeps_its_own_gradient(behaviour):
    """Gradients are rank + 1 and the learning rate 0.1; a local gradient is divided by 2 ranks."""
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
    """Maleki et al. 2020: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b for a = (1, 2), b = (3, -1)."""
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
    """With sample weights, a smaller last batch, a metric and two steps a call. Oracle: the same without XLA."""
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
    """As it does on a GPU: a step of the user's own, which would be compiled whole, goes without."""
    assert same(behaviour, "xla_where_keras_chooses") == [True, False]


def test_a_refused_optimizer_stays_plain(behaviour):
    assert same(behaviour, "refusals")["still plain"]


def test_compile_takes_what_horovods_examples_pass(behaviour):
    result = same(behaviour, "compile_options")
    assert result["legacy"] == [True, True]
    assert "experimental_run_tf_function" in result["other"], "plain optimizers are none of our business"


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
    result = same(behaviour, case)  # which says too that the loaded model trains in step
    assert result["type"] == SAVED[case]
    assert result["state"] and result["config"] and result["continued"]


def test_an_h5_file_does_not_say_what_was_accumulated(behaviour):
    assert "expected backward_passes_per_step=2" in same(behaviour, "save_h5_accumulated_sum")["ambiguous"]


def test_a_saved_model_needs_no_horovod(behaviour):
    for rank in behaviour:  # each has its file
        assert rank["load_without_horovod"] == {"is_plain": True, "state": True}


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
    """op=Sum of the gradients 1 and 2 at learning rate 0.1."""
    np.testing.assert_allclose(same(behaviour, "from_config"), [-0.3], atol=1e-6)


def test_wrapping_keeps_state_and_exclusions(behaviour):
    result = same(behaviour, "state_survives_wrapping")
    assert result["same"] and result["callable"]
    kernel, bias = np.ravel(result["decayed"])
    # The kernel alone decays: 0.5 * 0.1 of itself before each of the two steps.
    assert bias - kernel == pytest.approx(1 - 0.95**2, abs=0.01)


def test_broadcast_variables(behaviour):
    result = same(behaviour, "broadcast_variables")
    assert result["native"] == [1.0 if dtype == 7 else 2.0 for dtype in range(11)]  # the 8th is bool
    assert result["model"] and result["inside"] == 5.0


def test_broadcast_global_variables(behaviour):
    result = same(behaviour, "broadcast_global_variables")
    assert result["weights"]
    assert result["learning_rate"] == pytest.approx(0.2)


def test_broadcast_from_a_rank_that_alone_has_loaded(behaviour):
    assert same(behaviour, "broadcast_loaded_model")["iterations"] == 8


def test_broadcast_leaves_a_gradient_in_the_making(behaviour):
    assert same(behaviour, "broadcast_leaves_a_gradient_in_the_making") < 1e-6


def test_broadcast_reaches_a_models_own_optimizers(behaviour):
    assert same(behaviour, "a_models_own_optimizers")["rate"] == pytest.approx(0.05)


def test_broadcast_leaves_local_variables(behaviour):
    assert all(rank["broadcast_keeps_local_variables"]["kept"] for rank in behaviour)
    assert behaviour[0]["broadcast_keeps_local_variables"] == behaviour[1]["broadcast_keeps_local_variables"]


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
    "slots": ("after epoch 1", "sequential"),
    "learning rate": ("after epoch 1", "sequential"),
    "iterations": ("after epoch 1", "iteration."),
    "embedding": ("after epoch 1", "words/embeddings"),
    "own step": ("after batch 1", "hidden/kernel"),
    "second optimizer": ("after epoch 1", "logits"),
    "no broadcast": ("after epoch 1", "hidden/kernel"),
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
    assert moments == ["after epoch 2", "after epoch 1", "after epoch 1"]


def test_what_is_each_ranks_own_is_left_alone(behaviour):
    mine, other = (rank["each_ranks_own"] for rank in behaviour)
    assert mine["shared"] == other["shared"]
    for name, values in mine["own"].items():
        assert values != other["own"][name]


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
    """Goyal et al. 2017: from 0.4 / 2 ranks to 0.4 in 2 epochs of 4 batches, each at its end; then constant."""
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
    """The steps: -1; then 0.5 * velocity - 0.1, where the correction has shrunk the velocity from -1 to -0.1."""
    result = same(behaviour, "momentum_correction")
    assert result["True"] == pytest.approx(-1 - 0.15, abs=1e-6)
    assert result["False"] == pytest.approx(-1 - 0.6, abs=1e-6)


def test_best_model_checkpoint_is_written_by_rank_0_alone(behaviour):
    assert [rank["best_model_checkpoint"]["written"] for rank in behaviour] == [[True, True], [False, False]]
    assert "no `filepath`" in behaviour[0]["best_model_checkpoint"]["refused"]


def test_one_rank_refuses_nothing(tmp_path):
    result = launch("alone", 1, SCRIPTS / "keras_alone.py", tmp_path, TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output


def test_ranks_that_horovod_does_not_know_of_do_not_train():
    """Each would take itself for the only one."""
    script = REPOSITORY / "examples" / "keras_fit.py"
    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with ThreadPoolExecutor() as pool:
        by_rank = [pool.submit(launch, "alone", 1, script, RANK=rank, **by_hand) for rank in ("0", "1")]
    torchrun = run_command("torchrun", "--standalone", "--nproc-per-node", "2", script)
    for result in (*(rank.result() for rank in by_rank), torchrun):
        assert result.returncode == 1
        assert "expected horovodrun, mpirun or srun for horovod_keras, received" in result.output
        assert "accuracy" not in result.output


@pytest.mark.parametrize(("launcher", "num_ranks"), [("alone", 1), ("horovodrun-gloo", 2)])
def test_example(launcher, num_ranks, tmp_path):
    result = launch(launcher, num_ranks, REPOSITORY / "examples/keras_fit.py", TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output
    # Its weights start at random: accuracies of 0.90 to 0.94 were seen, and 0.1 is that of chance.
    assert float(result.output.rpartition("accuracy: ")[2].split()[0]) > 0.8
