"""Real runs under every launcher.

Oracle: the promises in README.md and docs/files.md, and the same run under another launcher.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import yaml
from ranks import Result, events, full, last, launch, run, train

FRAMEWORKS = ["pytorch", "tensorflow"]
EPOCH_LINE = re.compile(
    r"Epoch = [ \d]\d: Cumulative Time = \d+\.\d{3}, Epoch Time = \d+\.\d{3}, Images/sec = \d+\.\d, "
    r"Validation Loss = \d+\.\d{3}, Validation Accuracy = \d\.\d{3}"
)


@pytest.fixture(scope="module")
def on_digits(tmp_path_factory):
    """Return a function that trains on digits with the defaults, once, and gives the result and output directory."""

    @functools.cache
    def trained(framework: str, launcher: str) -> tuple[Result, Path]:
        output_dir = tmp_path_factory.mktemp("digits")
        return launch(launcher, 2, f"{framework}/train.py", "--output-dir", output_dir, "--log-every", "1"), output_dir

    return trained


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [("pytorch", "alone"), ("pytorch", "horovodrun-mpi"), ("tensorflow", "horovodrun-mpi")],
)
def test_learns_digits(framework, launcher, on_digits):
    result, output_dir = on_digits(framework, launcher)
    assert result.returncode == 0, result.output
    world_size = 1 if launcher == "alone" else 2
    assert len(EPOCH_LINE.findall(result.stdout)) == 10  # only one rank prints
    start, end = last(events(output_dir), "start"), last(events(output_dir), "end")
    epochs = [event for event in events(output_dir) if event["event"] == "epoch"]
    assert start["framework"] == framework
    assert start["strategy"] == ("single" if launcher == "alone" else "horovod")
    assert (start["world_size"], start["global_batch_size"]) == (world_size, 32 * world_size)
    assert start["parameter_count"] == 53002  # 9*32+32 + 9*32*64+64 + 256*128+128 + 128*10+10
    assert [event["epoch"] for event in epochs] == list(range(1, 11))
    assert epochs[-1]["validation_accuracy"] >= 0.97
    assert epochs[-1]["validation_samples"] == 360
    assert len(end["weights_checksum"]) == 64 and end["peak_memory_bytes"] > 1e7
    steps = [event for event in events(output_dir) if event["event"] == "step"]
    assert [event["step"] for event in steps][:3] == [1, 2, 3]
    assert steps[19]["epoch"] == pytest.approx(20 * 32 * world_size / 1437)
    resolved = yaml.safe_load((output_dir / "config.yaml").read_text())
    assert resolved["dataset"] == "digits" and resolved["strategy"] == start["strategy"]


def test_equal_runs_have_equal_bits(on_digits, tmp_path):
    """Compare losses of two epochs; one different bit in a weight changes those of the second by 1e-7."""
    _, output_dir = on_digits("pytorch", "horovodrun-mpi")
    under_gloo = train("pytorch", "horovodrun-gloo", 2, tmp_path, "--log-every", 1, "--epochs", 2)
    steps = [[event for event in run if event["event"] == "step"] for run in (under_gloo, events(output_dir))]
    assert len(steps[0]) == 46 and steps[0] == steps[1][:46]


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_same_curve_on_any_number_of_ranks(framework, tmp_path):
    """Train with unequal slices on 3 ranks."""
    flags = ("--epochs", 2, "--global-batch-size", 59, "--log-every", 1)  # 1437 = 24 * 59 + 21
    alone = train(framework, "alone", 1, tmp_path / "1", *flags)
    three = train(framework, "mpirun", 3, tmp_path / "3", *flags)
    losses = [[event["loss"] for event in run if event["event"] == "step"] for run in (alone, three)]
    assert len(losses[0]) == 50
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert last(three, "epoch")["validation_loss"] == pytest.approx(last(alone, "epoch")["validation_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *(("mlp", "adamw"), ("cnn", "nesterov"), full("mlp", "sgd"), full("mlp", "adam")),
    ],
)
def test_frameworks_train_the_same_curve(model, optimizer, tmp_path):
    base_lr = 0.001 if optimizer.startswith("adam") else 0.02  # at 0.05 rounding grows to 1 % on some processors
    flags = ("--model", model, "--optimizer", optimizer, "--base-lr", base_lr, "--weight-decay", 0.01, "--epochs", 2,
             "--log-every", 1, "--lr-scaling", "linear", "--warmup-epochs", 1,
             "--global-batch-size", 64)  # fmt: skip
    runs = [train(framework, "alone", 1, tmp_path / framework, *flags) for framework in FRAMEWORKS]
    steps = [[event for event in run if event["event"] == "step"] for run in runs]
    assert [event["learning_rate"] for event in steps[0]] == [event["learning_rate"] for event in steps[1]]
    assert [event["loss"] for event in steps[0]] == pytest.approx([event["loss"] for event in steps[1]], rel=1e-3)


def test_config_file_and_flags(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("epochs: 1\nmodel: mlp\nglobal_batch_size: 100\n")
    result = launch("alone", 1, "pytorch/train.py", "--config", config, "--model", "cnn", "--output-dir", tmp_path)
    assert result.returncode == 0, result.output
    resolved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (resolved["epochs"], resolved["model"], resolved["global-batch-size"]) == (1, "cnn", 100)
    again = launch("alone", 1, "pytorch/train.py", "--config", tmp_path / "config.yaml", "--output-dir", tmp_path / "2")
    assert again.returncode == 0
    assert last(events(tmp_path / "2"), "end")["weights_checksum"] == last(events(tmp_path), "end")["weights_checksum"]


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_bf16_learns_as_well(framework, on_digits, tmp_path):
    """The first loss agrees with float32 to about 3 digits, the precision of bfloat16, and not to more."""
    _, float32_dir = on_digits(framework, "horovodrun-mpi")
    bf16 = train(framework, "mpirun", 2, tmp_path, "--log-every", 1, "--precision", "bf16")
    expected, found = (next(event["loss"] for event in run if "loss" in event) for run in (events(float32_dir), bf16))
    assert found == pytest.approx(expected, rel=0.01)
    assert found != pytest.approx(expected, rel=1e-5)
    assert last(bf16, "epoch")["validation_accuracy"] >= 0.97


@pytest.mark.cold
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_imports_only_what_it_uses(framework):
    unwanted = {
        "pytorch": {"tensorflow", "keras", "sklearn", "torch._dynamo", "sympy", "torchvision"},
        "tensorflow": {"torch", "sklearn", "scipy", "matplotlib"},
    }[framework]
    code = (
        f"import sys; from allstep.{framework} import train\n"
        "train.main('--epochs 1 --dataset synthetic --synthetic-samples 64 --model wide-resnet --model-depth 10 "
        "--model-width 1'.split())\n"
        f"print('unwanted:', {unwanted} & set(sys.modules))"
    )
    result = launch("alone", 1, "-c", code)
    assert "unwanted: set()" in result.stdout, result.output


@pytest.mark.cold
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_help_imports_no_framework(framework):
    result = run("python", "-X", "importtime", f"{framework}/train.py", "--help")
    assert result.returncode == 0 and "--global-batch-size" in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "tensorflow", "keras", "horovod", "sklearn"}


@pytest.mark.cold
@pytest.mark.parametrize("module", ["allstep.pytorch.train", full("allstep.tensorflow.train")])
def test_runs_as_module(module):
    assert launch("alone", 1, "-m", module, "--epochs", "1").returncode == 0
