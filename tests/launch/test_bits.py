"""Equal bits with --slices on any number of ranks, in any strategy and launcher. Oracle: a run on one rank."""

import pytest
from ranks import REPOSITORY, events, full, last, launch, run

# Batches of 22 samples and a last one of 4 give 5 slices of unequal sizes, one of them empty. With batch norm.
FLAGS = (
    *("--dataset", "synthetic", "--synthetic-samples", 48, "--synthetic-shape", 8, 8, 1, "--synthetic-classes", 3),
    *("--model", "wide-resnet", "--model-depth", 10, "--model-width", 1),
    *("--global-batch-size", 22, "--slices", 5, "--epochs", 2, "--base-lr", 0.05),
    *("--log-every", 1, "--checkpoint-every", 2, "--keep-checkpoints", 9, "--clip-norm", 1),
)
TIMES = ("epoch_seconds", "cumulative_seconds", "images_per_second", "peak_memory_bytes", "time")
ALONE = ("single", "alone", 1)
CASES = {
    "pytorch": [("horovod", "horovodrun-gloo", 3)],
    "tensorflow": [("horovod", "horovodrun-gloo", 3), ("mirrored", "alone", 2)],
}
ELSEWHERE = {"pytorch": ("ddp", "alone", 2), "tensorflow": ("multi-worker-mirrored", "mpirun", 2)}
MORE_CASES = {
    "pytorch": [
        *(("horovod", "mpirun", 4), ("ddp", "alone", 4), ELSEWHERE["pytorch"]),
        *(("fsdp", "alone", 1), ("fsdp", "mpirun", 3), ("fsdp", "alone", 4)),
    ],
    "tensorflow": [("horovod", "mpirun", 2), ELSEWHERE["tensorflow"]],
}


def start(framework, strategy, launcher, num_ranks, output_dir, *flags):
    flag = {"ddp": "--num-gpus", "fsdp": "--num-gpus", "mirrored": "--num-devices"}.get(strategy)
    own = (flag, num_ranks) if flag and launcher == "alone" else ()
    if framework == "pytorch" and strategy != "single":
        own += ("--bucket-size", 0.05)  # the network has four buckets
    words = (f"{framework}/train.py", "--output-dir", output_dir, *FLAGS, "--strategy", strategy, *own, *flags)
    return launch(launcher, num_ranks, *map(str, words))


def what_it_left(output_dir):
    """Return all numbers of metrics.jsonl except times, and the array files of the checkpoints by name."""
    numbers = [
        {name: value for name, value in event.items() if name not in TIMES}
        for event in events(output_dir)
        if event["event"] in ("step", "epoch", "end")
    ]
    files = {str(path.relative_to(output_dir)): path.read_bytes() for path in output_dir.rglob("*.safetensors")}
    return numbers, files


@pytest.fixture(scope="module", params=list(CASES))
def reference(request, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp(request.param)
    result = start(request.param, *ALONE, output_dir)
    assert result.returncode == 0, result.output
    return request.param, output_dir


@pytest.mark.parametrize("cases", [CASES, full(MORE_CASES)], ids=["some", "more"])
def test_any_number_of_ranks_and_any_strategy_leave_the_same_bits(cases, reference, tmp_path):
    framework, alone = reference
    numbers, files = what_it_left(alone)
    assert len(files) == 8 and len(numbers) == 9
    for strategy, launcher, num_ranks in cases[framework]:
        output_dir = tmp_path / f"{strategy}-{num_ranks}"
        result = start(framework, strategy, launcher, num_ranks, output_dir, "--audit", 0.5)  # does not change results
        assert result.returncode == 0, result.output
        assert what_it_left(output_dir) == (numbers, files), (strategy, launcher, num_ranks)


def test_a_step_that_is_one_function_leaves_the_same_bits(tmp_path):
    """One rank has one of three slices, whose step TensorFlow runs as a single function, and the other has two."""
    left = []
    for strategy, launcher, num_ranks in (ALONE, ("horovod", "mpirun", 2)):
        output_dir = tmp_path / strategy
        result = start(
            "tensorflow", strategy, launcher, num_ranks, output_dir, "--slices", 3, "--precision", "fp16", "--epochs", 1
        )
        assert result.returncode == 0, result.output
        left.append(what_it_left(output_dir))
    assert left[0] == left[1]


def test_a_run_that_goes_on_elsewhere_ends_in_the_same_bits(reference, tmp_path):
    """Resume in the middle of an epoch, with another number of ranks and another strategy."""
    framework, alone = reference
    strategy, launcher, num_ranks = ELSEWHERE[framework]
    checkpoint = alone / "checkpoints" / "step-00000002"
    result = start(framework, strategy, launcher, num_ranks, tmp_path, "--resume", checkpoint)
    assert result.returncode == 0, result.output
    assert last(events(tmp_path), "end")["weights_checksum"] == last(events(alone), "end")["weights_checksum"]
    numbers, files = what_it_left(tmp_path)
    before = what_it_left(alone)
    assert numbers == before[0][2:]
    assert files == {name: data for name, data in before[1].items() if name in files}


def test_a_resume_says_what_the_bits_depend_on(reference, tmp_path):
    framework, alone = reference
    assert "\n# threads: 1\n" in (alone / "config.yaml").read_text()
    words = (f"{framework}/train.py", *FLAGS, "--output-dir", tmp_path, "--resume", alone / "checkpoints/step-00000002")
    result = launch("alone", 1, *map(str, words), OMP_NUM_THREADS="2")
    assert result.returncode == 2
    assert result.stderr == (
        "allstep: error: expected 1 threads a rank with --slices, as in the run that wrote the checkpoint, received 2; "
        "set OMP_NUM_THREADS=1, or leave --slices out\n"
    )


@pytest.mark.parametrize(
    ("framework", "algorithm", "by_all_reduce"),
    [
        ("pytorch", 4, [False] * 4),  # a ring
        ("tensorflow", 3, [False, True, True, True]),  # recursive doubling, which adds in the tree's order
        full("pytorch", 3, [False, True, True, True]),
        full("tensorflow", 4, [False] * 4),
    ],
)
def test_an_all_reduce_is_used_where_it_adds_up_by_the_tree(framework, algorithm, by_all_reduce):
    """Sum over four ranks by Open MPI's algorithm of that number."""
    chosen = {"use_dynamic_rules": "1", "allreduce_algorithm": str(algorithm)}
    variables = {f"OMPI_MCA_coll_tuned_{name}": value for name, value in chosen.items()}
    result = launch("mpirun", 4, REPOSITORY / "tests/launch/ranks/ordered_sums.py", framework, **variables)
    assert result.returncode == 0, result.output
    assert "by all-reduce: " + " ".join(map(str, by_all_reduce)) in result.stdout


def test_without_slices_ranks_part(tmp_path):
    """Control: with batch norm and a normal all-reduce, two ranks differ from one."""
    words = [word for word in FLAGS if word not in ("--slices", 5)]
    losses = []
    for launcher, num_ranks in (("alone", 1), ("mpirun", 2)):
        output_dir = tmp_path / str(num_ranks)
        result = launch(launcher, num_ranks, "pytorch/train.py", "--output-dir", output_dir, *map(str, words))
        assert result.returncode == 0, result.output
        losses.append(last(events(output_dir), "epoch")["train_loss"])
    assert abs(losses[0] - losses[1]) > 1e-4 * losses[0]


NETWORK = """
def build(shape, classes):
    from torch import nn
    layers = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, classes)
    return nn.Sequential(nn.Flatten(), *layers)
"""


@pytest.mark.parametrize("optimizer", ["lamb", *map(full, ("lars", "novograd", "adamw"))])
def test_what_needs_whole_weights_or_draws_is_the_same_on_any_rank(optimizer, tmp_path):
    """Train with norms of sharded weights, dropout, noise, accumulation and half precision."""
    (tmp_path / "network.py").write_text(NETWORK)
    words = ("--model", f"{tmp_path / 'network.py'}:build", "--dataset", "digits", "--global-batch-size", 200)
    words += ("--slices", 3, "--accumulate-steps", 2, "--precision", "fp16", "--optimizer", optimizer, "--epochs", 1)
    words += ("--weight-decay", 0.01, "--clip-norm", 0.5, "--gradient-noise", 0.001, "--ema", 0.9, "--log-every", 1)
    left = []
    for strategy, num_ranks in (("single", 1), ("fsdp", 3)):
        output_dir = tmp_path / strategy
        own = ("--strategy", strategy)
        if num_ranks > 1:
            own += ("--num-gpus", num_ranks, "--bucket-size", 0.001)  # two buckets
        result = run("python", "pytorch/train.py", "--output-dir", output_dir, *map(str, (*words, *own)))
        assert result.returncode == 0, result.output
        left.append(what_it_left(output_dir))
    assert left[0] == left[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--slices", 1, "--strategy", "ddp", "--num-gpus", 2), "at least the number of processes, 2, received 1"),
        (("--slices", 8, "--global-batch-size", 7), "a global batch of at least 8 samples for --slices 8, received 7"),
        (("--slices", 2, "--accumulate-steps", 3, "--global-batch-size", 5), "at least 6 samples for --slices 2"),
        (("--slices", 2, "--strategy", "model-parallel"), "expected --slices with --strategy horovod"),
        (("--slices", 2, "--strategy", "ddp", "--sync-batch-norm"), "--slices or --sync-batch-norm, received both"),
        (("--slices", 2, "--strategy", "ddp", "--comm-hook", "fp16"), "--slices or --comm-hook, received both"),
        (("--bucket-size", 3, "--strategy", "fsdp"), "expected --slices with --bucket-size and --strategy fsdp"),
        (("--slices", 2, "--strategy", "fsdp", "--trace", "--output-dir", "x"), "expected --trace with --strategy"),
        (("--slices", 0), "expected --slices to be at least 1, received 0"),
        (("--audit", 0.1), "expected --slices with --audit, which has two ranks compute each slice, received none"),
        (("--audit", 0, "--slices", 2), "expected --audit to be above 0"),
    ],
)
def test_mistakes_are_one_line(flags, expected):
    result = run("python", "pytorch/train.py", *map(str, flags))
    assert result.returncode == 2
    assert expected in result.stderr and result.stderr.count("\n") == 1


def test_fewer_slices_than_ranks_are_one_line():
    result = launch("mpirun", 2, "tensorflow/train.py", "--slices", "1")
    assert result.returncode == 2
    assert result.output.count("expected --slices to be at least the number of ranks, 2, received 1") == 1
