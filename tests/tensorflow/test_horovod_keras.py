"""Horovod's Keras API by horovod_keras: two real ranks train like one process, and a single rank without a launcher.

Oracle: plain Keras in one process with the whole batch; the other rank's weights.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from keras_ranks import SCRIPTS, run_on_two_ranks
from ranks import REPOSITORY, full, launch, run


@pytest.fixture(scope="module")
def numerics(request, tmp_path_factory) -> list[dict[str, list[np.ndarray]]]:
    """Run the requested cases, and return the trained arrays by case: of rank 0, of rank 1, and of the oracle."""
    items = [item for item in request.session.items if item.module is request.module]
    cases = sorted({item.callspec.params["case"] for item in items if "numerics" in item.fixturenames})
    directory = tmp_path_factory.mktemp("numerics")
    run_on_two_ranks("horovodrun-gloo", "keras_numerics.py", directory, *cases)
    results: list[dict[str, list[np.ndarray]]] = [{}, {}, {}]
    for rank in range(2):
        arrays = np.load(directory / f"rank{rank}.npz")
        for key in arrays:
            case, *oracle, _ = key.split("/")
            results[2 if oracle else rank].setdefault(case, []).append(arrays[key])
    return results


# By default 1e-6, the rounding of float32 over 12 steps in another order of summation; larger for 16 bits.
TOLERANCES = {"fp16": 1e-4, "fp16_embedding": 1e-4, "bfloat16": 1e-2}
# The learning rate of the oracle, which is optimizer state, is different; compare only this number of weights.
WEIGHTS_ALONE = {"passes_summed": 4, "sum": 4, "loss_scale_accumulation": 4}
CASES = [
    *("sgd", "nesterov", "adam", "adam_schedule", "weight_decay", "muon"),
    *("clipnorm", "clipvalue", "global_clipnorm", "constraint", "ema", "ema_overwrite"),
    *("accumulation", "accumulation_eager", "accumulation_embedding", "passes_averaged", "passes_summed"),
    *("loss_scale_factor", "loss_scale_inside", "loss_scale_outside", "loss_scale_accumulation"),
    *("embedding", "embedding_clipnorm", "embedding_as_dense", "embedding_predivide"),
    *("positions", "positions_clipped_eager"),
    *("unused_layer", "unused_layer_accumulation", "eager", "custom_training_step"),
    *("sum", "fp16", "fp16_embedding", "bfloat16", "predivide", "devices"),
    *("two_groups", "more_groups_than_gradients"),
    *("xla", "xla_accumulation", "xla_loss_scale", "xla_embedding"),
]
# Other cases cover the same code.
REPEATED = [
    *("sgd", "adam", "muon", "clipnorm", "clipvalue", "constraint", "ema", "eager", "sum", "unused_layer"),
    *("accumulation_eager", "passes_averaged", "loss_scale_factor", "loss_scale_accumulation", "fp16_embedding"),
    *("embedding_clipnorm", "embedding_predivide", "devices", "more_groups_than_gradients"),
    *("xla", "xla_loss_scale", "xla_embedding"),
]
of_all_cases = pytest.mark.parametrize("case", [full(case) if case in REPEATED else case for case in CASES])


def test_every_case_is_tested():
    written = re.findall(r'^    "(\w+)": Case\(', (SCRIPTS / "keras_numerics.py").read_text(), re.MULTILINE)
    assert sorted(written) == sorted(CASES)


@of_all_cases
def test_ranks_end_with_the_same_bits(numerics, case):
    for mine, other in zip(numerics[0][case], numerics[1][case], strict=True):
        np.testing.assert_array_equal(mine, other)


@of_all_cases
def test_equals_one_process_with_the_whole_batch(numerics, case):
    trained, expected = numerics[0][case], numerics[2][case]
    assert len(trained) == len(expected)
    for array, oracle in list(zip(trained, expected, strict=True))[: WEIGHTS_ALONE.get(case)]:
        np.testing.assert_allclose(array, oracle, rtol=0, atol=TOLERANCES.get(case, 1e-6))


def test_one_rank_refuses_nothing(tmp_path):
    result = launch("alone", 1, SCRIPTS / "keras_alone.py", tmp_path, TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output


def test_ranks_that_horovod_does_not_know_of_do_not_train():
    """Without this error, each rank would train as the only one."""
    script = SCRIPTS / "lean.py", REPOSITORY / "examples" / "keras_fit.py"
    by_hand = launch("alone", 1, *script, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torchrun = run("torchrun", "--standalone", "--nproc-per-node", "2", *script)
    for result in (by_hand, torchrun):
        assert result.returncode == 1
        assert "expected horovodrun, mpirun or srun for horovod_keras, received" in result.output
        assert "accuracy" not in result.output


@pytest.mark.parametrize(("launcher", "num_ranks"), [full("alone", 1), ("horovodrun-gloo", 2)])
def test_example(launcher, num_ranks, tmp_path):
    result = launch(launcher, num_ranks, REPOSITORY / "examples/keras_fit.py", TF_CPP_MIN_LOG_LEVEL="2")
    assert result.returncode == 0, result.output
    # Its initial weights are random; accuracies were 0.90 to 0.94, and chance is 0.1.
    assert float(result.output.rpartition("accuracy: ")[2].split()[0]) > 0.8
