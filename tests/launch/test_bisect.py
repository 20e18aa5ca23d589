"""`allstep bisect` on two runs, one of which has a planted fault. Oracle: the planted fault, at a random position."""

import functools
import random
import sys

import numpy as np
import pytest
from tests.ranks import REPOSITORY, full, launch, run

from allstep.common.exact import trace

FLAGS = {
    "pytorch": ("--model", f"{REPOSITORY}/tests/launch/ranks/planted_network.py:build"),
    "tensorflow": ("--model", "mlp"),
}
COMMON = "--global-batch-size", "128", "--epochs", "1", "--checkpoint-every", "4", "--trace", "--base-lr", "0.05"
NUM_SLICES = 4


def train(output_dir, *flags, framework="pytorch", num_ranks=2, program=(), **environ):
    launcher = "mpirun" if num_ranks > 1 else "alone"
    words = (*(program or (f"{framework}/train.py",)), "--output-dir", output_dir, *FLAGS[framework], *COMMON, *flags)
    result = launch(launcher, num_ranks, *words, **environ)
    assert result.returncode == 0, result.output
    return output_dir


def bisect(*words):
    return run(sys.executable, "-m", "allstep.commands.cli", "bisect", *words)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a function that gives the output directory of a run without a fault, by framework and slices."""

    @functools.cache
    def trained(framework="pytorch", num_slices=None):
        flags = ("--slices", str(num_slices)) if num_slices else ()
        return train(tmp_path_factory.mktemp("sound") / "run", *flags, framework=framework)

    return trained


FAULTS = [
    ("rate", 7, "the learning rate"),
    ("order", 5, "the inputs"),
    ("broadcast", 1, "the weight {first} before the step"),
]
MORE = [("pytorch", NUM_SLICES), ("tensorflow", NUM_SLICES), ("tensorflow", None)]


@pytest.mark.parametrize(
    ("fault", "step", "tensor", "framework", "num_slices"),
    [
        *((*fault, "pytorch", None) for fault in FAULTS),
        *(full(*fault, *run) for fault in FAULTS[:2] for run in MORE),
        # Keras' drop-in itself refuses the first weights of a run without slices, before the second step.
        *(full(*FAULTS[2], *run) for run in MORE[:2]),
    ],
)
def test_a_fault_of_one_rank_is_named(fault, step, tensor, framework, num_slices, sound, tmp_path):
    flags = ("--slices", str(num_slices)) if num_slices else ()
    program = "tests/launch/ranks/planted.py", framework, fault, "1", str(step)
    faulty = train(tmp_path / "faulty", *flags, framework=framework, program=program)
    result = bisect(sound(framework, num_slices), faulty, "--no-replay")
    assert result.returncode == 1, result.output
    tensor = tensor.format(first={"pytorch": "1.weight", "tensorflow": "fc1.weight"}[framework])
    part = " in slice 2" if fault == "order" and num_slices else ""  # the first slice of rank 1
    assert result.stdout.splitlines()[0] == f"the runs part at step {step}, rank 1, {tensor}{part}"


@pytest.mark.parametrize("num_slices", [None, *map(full, [NUM_SLICES])])
def test_a_flipped_bit_is_named_and_does_not_come_again(num_slices, sound, tmp_path):
    draw = random.Random(7)
    step, rank, layer = draw.randrange(2, 11), draw.randrange(2), draw.choice([1, 3, 5])
    flags = ("--slices", str(num_slices)) if num_slices else ()
    num_passes = num_slices // 2 if num_slices else 1
    before = 4 + num_passes * (step - 1)  # backward passes: four try the network before the first step
    faulty = train(tmp_path / "faulty", *flags, ALLSTEP_PLANTED=f"{before + 1} {rank} {layer}")
    right = sound("pytorch", num_slices)
    result = bisect(right, faulty, *FLAGS["pytorch"])
    assert result.returncode == 1, result.output
    first, *verdicts = result.stdout.splitlines()
    part = f" in slice {rank * num_passes}" if num_slices else ""
    assert first == f"the runs part at step {step}, rank {rank}, the local gradient of {layer}.bias{part}"
    assert len(verdicts) == 2, verdicts
    assert verdicts[0].startswith(f"{right}: step {step} gives its own digests again")
    assert verdicts[1].startswith(f"{faulty}: does not give its own digests again, first at step {step}, rank {rank}")


def test_another_seed_is_named(sound, tmp_path):
    result = bisect(sound(), train(tmp_path / "other", "--seed", "1"), "--no-replay")
    assert result.returncode == 1, result.output
    assert result.stdout.splitlines()[0] == "the runs part at step 1, rank 0, the inputs"
    assert "  seed: " in result.stdout


def test_slices_are_equal_on_any_number_of_ranks(sound, tmp_path):
    runs = [train(tmp_path / str(n), "--slices", "3", num_ranks=n) for n in (1, 2)]
    result = bisect(*runs)
    assert (result.returncode, result.stdout) == (0, "equal for steps 1 to 12\n")
    for other, expected in ((runs[0], "received another --slices"), (tmp_path, "which has no trace of rank 0")):
        result = bisect(sound(), other)
        assert result.returncode == 2
        assert expected in result.stderr and result.stderr.count("\n") == 1


def test_tensorflow_names_the_slice_and_the_rank_of_a_flipped_bit(tmp_path):
    flags = ("--model", "mlp", "--global-batch-size", 100, "--slices", 4, "--epochs", 1, "--trace", "--output-dir")
    alone, faulty = tmp_path / "alone", tmp_path / "faulty"
    result = run(sys.executable, "tensorflow/train.py", *map(str, (*flags, alone)))
    assert result.returncode == 0, result.output
    flipping = ("tests/launch/ranks/flipping.py", "tensorflow", 1, "all", *flags, faulty)
    result = launch("mpirun", 2, *map(str, flipping))
    assert result.returncode == 0, result.output
    result = bisect(alone, faulty)
    assert result.returncode == 1, result.output
    first, *_, own, others = result.stdout.splitlines()
    assert first == "the runs part at step 3, ranks 0 and 1, the local gradient of fc1.weight in slice 2"
    assert own.startswith(f"{alone}: step 3 gives its own digests again")
    assert others.startswith(f"{faulty}: does not give its own digests again, first at step 3, rank 1")


def test_tensorflow_names_the_rank_of_a_flipped_bit_without_slices(tmp_path):
    flags = ("--model", "mlp", "--global-batch-size", "300", "--epochs", "1", "--trace", "--output-dir")
    sound, faulty = tmp_path / "sound", tmp_path / "faulty"
    for program, output_dir in (
        (("tensorflow/train.py",), sound),
        (("tests/launch/ranks/flipping.py", "tensorflow", "1", "all"), faulty),
    ):
        result = launch("mpirun", 2, *program, *flags, str(output_dir))
        assert result.returncode == 0, result.output
    result = bisect(sound, faulty, "--no-replay")
    assert result.returncode == 1, result.output
    assert result.stdout.splitlines()[0] == "the runs part at step 3, rank 1, the local gradient of fc1.weight"
    found = trace.read(sound)
    assert found.first.activations == ("fc3", "fc2", "fc1")
    for field in found.first.row_type.names:
        assert field == "weights_before" or all(np.all(rows[field] != 0) for rows in found.rows), field
