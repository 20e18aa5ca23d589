"""Wrong flags of the trainers, all reported before a framework is imported. Oracle: the contract in `mistake`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from mistake import PYTORCH, TENSORFLOW, Mistake, check, check_line

from allstep.common.base.errors import UserError
from allstep.common.training.start import start
from allstep.pytorch import strategies

HUGE = "1" + 30 * "0"


def alone(flags: str, expected: str, received: str, **options: object) -> Mistake:
    """Return a mistake of a trainer without a launcher; the frameworks share the code that finds it."""
    return Mistake(f"{PYTORCH} {flags}", expected, received, **options)


# By flag and value: what the line states as expected.
VALUES = {
    # not of the type
    "--batch-size 1e3": "a whole number",
    "--batch-size many": "a whole number",
    "--batch-size 32.0": "a whole number",
    "--batch-size 0x20": "a whole number",
    "--epochs 1_000": "a whole number",
    "--epochs ''": "a whole number",
    "--epochs ' 3'": "a whole number",
    "--epochs ٣": "a whole number",
    "--epochs true": "a whole number",
    f"--seed {5000 * '9'}": "a whole number",
    "--base-lr high": "a number",
    "--base-lr 0,1": "a number",
    "--base-lr nan": "a number",
    "--momentum nan": "a number",
    "--weight-decay nan": "a number",
    "--clip-norm nan": "a number",
    "--ema often": "a number",
    "--warmup-epochs nan": "a number",
    "--lr-milestones nan": "a number",
    "--lr-power nan": "a number",
    "--final-lr nan": "a number",
    "--bucket-size nan": "a number",
    "--stall-timeout nan": "a number",
    "--fault-timeout nan": "a number",
    "--model ''": "one of mlp, cnn",
    "--model resnet5000": "one of mlp, cnn",
    "--model CNN": "one of mlp, cnn",
    "--dataset digit": "one of digits, mnist",
    "--optimizer lion": "one of sgd",
    "--loss mes": "one of cross-entropy, mse",
    "--model timm:": "one of mlp, cnn",
    "--precision fp8": "one of float32, tf32, bf16, fp16",
    "--lr-decay cosin": "one of constant",
    "--lr-scaling log": "one of none, linear",
    "--op median": "one of average",
    "--compression off": "one of none, fp16",
    "--comm-hook gzip": "one of none, bf16",
    "--communication mpi": "one of auto, ring",
    # too small
    "--epochs 0": "at least 1",
    "--epochs -3": "at least 1",
    "--batch-size 0": "at least 1",
    "--batch-size -1": "at least 1",
    "--global-batch-size 0": "at least 1",
    "--accumulate-steps 0": "at least 1",
    "--stages 0": "at least 1",
    "--micro-batches 0": "at least 1",
    "--num-gpus 0": "at least 1",
    "--num-devices -2": "at least 1",
    "--keep-checkpoints 0": "at least 1",
    "--log-every -1": "at least 0",
    "--checkpoint-every -1": "at least 0",
    "--commit-every 0": "at least 1",
    "--early-stop-patience -1": "at least 0",
    "--seed -1": "at least 0",
    "--synthetic-samples 0": "at least 1",
    "--synthetic-classes 1": "at least 2",
    "--image-size 0": "at least 1",
    "--decode-threads 0": "at least 1",
    "--base-lr 0": "above 0",
    "--base-lr -1e3": "above 0",
    "--base-lr -inf": "above 0",
    "--momentum -0.1": "at least 0",
    "--weight-decay -1": "at least 0",
    "--weight-decay 1e-40": "0 or at least",
    "--clip-norm 0": "above 0",
    "--gradient-noise -1": "at least 0",
    "--label-smoothing -0.1": "at least 0",
    "--ema -0.5": "at least 0",
    "--warmup-epochs -1": "at least 0",
    "--lr-milestones -1": "at least 0",
    "--lr-step-factor 0": "above 0",
    "--lr-power 0": "above 0",
    "--lr-power -2": "above 0",
    "--final-lr -1": "at least 0",
    "--bucket-size -1": "at least 0",
    "--stall-timeout -1": "at least 0",
    "--fault-timeout 1": "at least 3",
    # too large
    f"--epochs {HUGE}": "at most",
    f"--batch-size {HUGE}": "at most",
    f"--global-batch-size {HUGE}": "at most",
    f"--accumulate-steps {HUGE}": "at most",
    f"--micro-batches {HUGE}": "at most",
    f"--log-every {HUGE}": "at most",
    f"--checkpoint-every {HUGE}": "at most",
    f"--keep-checkpoints {HUGE}": "at most",
    f"--early-stop-patience {HUGE}": "at most",
    f"--synthetic-samples {HUGE}": "at most",
    "--synthetic-classes 1000000000000": "at most",
    "--seed 18446744073709551616": "at most",
    "--stages 100000": "at most",
    "--num-gpus 100000": "cores of this machine",
    "--num-devices 100000": "cores of this machine",
    "--decode-threads 1000000": "a thread of every rank",
    "--image-size 1000000": "at most",
    "--base-lr inf": "at most",
    "--base-lr 1e31": "at most",
    "--momentum 1": "below 1",
    "--momentum inf": "below 1",
    "--weight-decay inf": "at most",
    "--clip-norm inf": "at most",
    "--gradient-noise inf": "at most",
    "--label-smoothing 1": "below 1",
    "--ema 1": "below 1",
    "--lr-milestones inf": "at most",
    "--lr-step-factor 1.5": "at most 1",
    "--lr-power inf": "at most",
    "--final-lr inf": "at most",
    "--warmup-epochs inf": "at most",
    "--bucket-size inf": "at most",
    "--stall-timeout inf": "at most",
    "--fault-timeout inf": "at most",
    # EPOCH:FACTOR
    "--batch-ramp 5": "EPOCH:FACTOR",
    "--batch-ramp 5:1.5": "EPOCH:FACTOR",
    "--batch-ramp 5:0": "EPOCH:FACTOR",
    "--batch-ramp -1:2": "EPOCH:FACTOR",
    "--batch-ramp nan:2": "EPOCH:FACTOR",
    "--batch-ramp 0:100000000000": "EPOCH:FACTOR",
    # nothing
    "--output-dir ''": "a path",
    "--init-from ''": "a path",
    "--data-dir ''": "a path",
    "--timeline ''": "a path",
    "--config ''": "a path",
    "--resume ''": "a text",
    "--resume ' '": "a text",
    "--mirror ''": "a text",
    "--strategy ''": "a text",
}

FLAGS = {
    "a flag that is not there": alone("--epoch 3", "a flag of train.py", "--epoch; did you mean --epochs?"),
    "a short form": alone("--batch 3", "a flag", "--batch"),
    "one hyphen": alone("-epochs 3", "a flag", "-epochs; did you mean --epochs?"),
    "no where no is not": alone("--no-epochs", "a flag", "--no-epochs"),
    "a word": alone("digits", "flags and their values", "digits"),
    "a value too many": alone("--epochs 3 4", "flags and their values", "4"),
    "no value": alone("--epochs", "a value after --epochs", "none"),
    "no value before a flag": alone("--epochs --drop-last", "a value after --epochs", "none"),
    "no value after --config": alone("--config", "a value after --config", "none"),
    "a value for a switch": alone("--drop-last=3", "--drop-last alone", "3"),
    "a flag for a switch's value": alone("--drop-last=--list-strategies", "--drop-last alone", "--list-strategies"),
    "tyro's own flag": alone("--tyro-print-completion csh", "a flag of train.py", "--tyro-print-completion"),
    "two numbers for a shape": alone("--synthetic-shape 9 7", "--synthetic-shape to be 3 values", "2 values"),
    "four numbers for a shape": alone("--synthetic-shape 9 7 3 1", "3 values", "4 values"),
    "a shape of 0": alone("--synthetic-shape 0 7 3", "--synthetic-shape to be at least 1", "0"),
    "a terminal's commands": alone("--model '\x1b[31mred'", "--model to be one of", "'\\x1b[31mred'"),
    "a line within": alone("--model 'a\nb'", "--model to be one of", "'a\\nb'"),
    "unknown strategy": alone("--strategy hogwild", "--strategy to be one of", "hogwild"),
    "nearly a strategy": alone("--strategy horovot", "--strategy to be one of", "did you mean horovod?"),
    "a strategy of TensorFlow": alone("--strategy mirrored", "--strategy to be one of", "-m allstep.tensorflow.train"),
    "another strategy's flag": alone("--comm-hook fp16", "--comm-hook with --strategy ddp alone", "single"),
    "the other framework's flag": alone("--num-devices 2", "--num-devices with TensorFlow alone", "2"),
    "momentum without any": alone(
        "--optimizer lamb --momentum 0.5", "--momentum with --optimizer sgd or nesterov or lars alone", "0.5"
    ),
    "NovoGrad's flag": alone(
        "--optimizer adam --grad-averaging", "--grad-averaging with --optimizer novograd alone", "adam"
    ),
    "a norm of no average": alone(
        "--strategy horovod --op sum --clip-norm 1", "--op average with --clip-norm", "sum; leave one of them out"
    ),
    "noise on no average": alone(
        "--strategy horovod --op adasum --gradient-noise 1", "--op average with --gradient-noise", "adasum"
    ),
    "more stages than layers": alone("--strategy model-parallel --stages 5", "--stages to be at most 4", "5"),
    "both batch sizes": alone("--batch-size 1 --global-batch-size 2", "--batch-size (per rank) or", "both"),
    "resume and init-from": alone("--output-dir x --resume latest --init-from y", "--resume or --init-from", "both"),
    "latest of nothing": alone("--resume latest", "--output-dir with --resume latest", "none"),
    "steps logged nowhere": alone("--log-every 1", "--output-dir with --log-every", "none"),
    "checkpoints nowhere": alone("--checkpoint-every 1", "--output-dir with --checkpoint-every", "none"),
    "TensorBoard nowhere": alone("--tensorboard", "--output-dir with --tensorboard", "none"),
    # the schedule
    "a warm-up beyond the run": alone("--epochs 3 --warmup-epochs 4", "--warmup-epochs to be 0 to 3", "4"),
    "milestones that descend": alone("--lr-milestones 5 3", "--lr-milestones to be", "5.0 3.0"),
    "a milestone twice": alone("--lr-milestones 5 5", "--lr-milestones to be", "5.0 5.0"),
    "a final rate above the rate": alone("--base-lr 0.1 --final-lr 0.2", "--final-lr to be 0 to 0.1", "0.2"),
    "a ramp that descends": alone("--batch-ramp 5:2 3:4", "--batch-ramp to have epochs that ascend", "5:2 3:4"),
    "a ramp beyond the data": alone("--batch-ramp 1:1000", "at most all 1437 training samples", "32000"),
    "a batch beyond the data": alone("--global-batch-size 100000", "at most all 1437 training samples", "100000"),
    "a rank's batch beyond the data": alone("--batch-size 1438", "at most all 1437 training samples", "1438"),
    "passes beyond the data": alone("--accumulate-steps 1000", "at most all 1437 training samples", "32000"),
    "a batch beyond synthetic data": alone(
        "--dataset synthetic --synthetic-samples 9 --batch-size 10", "at most all 9 training samples", "10"
    ),
    # networks and losses
    "a library's network, the other framework's": alone(
        "--model keras:ResNet50", "--model to be a network of PyTorch", "keras:ResNet50"
    ),
    "a network in no file": alone("--model {here}/my.py:build", "a Python file in --model", "{here}/my.py:build"),
    "a loss in no file": alone("--loss {here}/my.py:loss", "a Python file in --loss", "{here}/my.py:loss"),
    "a library's network, the other framework's, TensorFlow": Mistake(
        f"{TENSORFLOW} --model timm:resnet18", "--model to be a network of TensorFlow", "timm:resnet18"
    ),
    # images
    "images beyond the memory": alone(
        "--dataset synthetic --synthetic-shape 65536 65536 3", "a network and a batch for the", "65536x65536x3"
    ),
    "synthetic images without a limit": alone(
        "--dataset synthetic --synthetic-shape 1000000 1000000 3", "--synthetic-shape to be at most", "1000000"
    ),
    "images too small for the network": alone(
        "--dataset synthetic --synthetic-shape 4 4 1", "images of 6 x 6 pixels or more", "4 x 4"
    ),
    "a folder's images too small": alone("--dataset image-folder --image-size 5", "6 x 6 pixels", "5 x 5"),
    "images decoded by TensorFlow": Mistake(
        f"{TENSORFLOW} --dataset image-folder --decode gpu", "--decode cpu in TensorFlow", "gpu"
    ),
    "digits decoded": alone("--decode gpu", "--dataset image-folder with --decode gpu", "digits"),
    "images decoded on a GPU for a CPU": alone(
        "--dataset image-folder --decode gpu --device cpu", "--device auto or cuda", "cpu"
    ),
    "images decoded on a GPU and mixed": alone(
        "--dataset image-folder --decode gpu --mixup 0.2", "--decode cpu with --mixup", "gpu and 0.2"
    ),
    "images decoded on no GPU": alone(
        "--dataset image-folder --decode gpu", "a GPU for each rank", "ranks that train on the CPU"
    ),
    # paths
    "a folder in /proc": alone("--output-dir /proc/allstep", "--output-dir to be a path that can be", "/proc/allstep"),
    "a folder that is a file": alone(
        "--output-dir {here}/a", "--output-dir to be a path", "{here}/a", prepare=lambda here: (here / "a").touch()
    ),
    "a folder below a file": alone(
        "--output-dir {here}/a/b", "--output-dir to be a path", "{here}/a/b", prepare=lambda here: (here / "a").touch()
    ),
    "a folder whose name is too long": alone(f"--output-dir {300 * 'x'}", "--output-dir to be a path", "xxx"),
    "a link that leads to itself": alone(
        "--output-dir a", "--output-dir to be a path", "a", prepare=lambda here: os.symlink("a", here / "a")
    ),
    "a timeline in /proc": alone(
        "--strategy horovod --timeline /proc/x/t.json", "--timeline to be a path that can be written", "/proc/x/t.json"
    ),
    "a timeline that is a folder": alone("--strategy horovod --timeline {here}", "--timeline to be a path", "{here}"),
    "a timeline that is a pipe": alone(
        "--strategy horovod --timeline t",
        "--timeline to be a path",
        "t",
        prepare=lambda here: os.mkfifo(Path(here, "t")),
    ),
    # Flags that only TensorFlow's trainer handles.
    "epochs 0, TensorFlow": Mistake(f"{TENSORFLOW} --epochs 0", "--epochs to be at least 1", "0"),
    "a flag that is not there, TensorFlow": Mistake(f"{TENSORFLOW} --epoch 3", "a flag of train.py", "--epochs?"),
    "a folder in /proc, TensorFlow": Mistake(
        f"{TENSORFLOW} --output-dir /proc/allstep", "--output-dir to be a path that can be", "/proc/allstep"
    ),
    "images too small, TensorFlow": Mistake(
        f"{TENSORFLOW} --dataset synthetic --synthetic-shape 4 4 1", "images of 6 x 6 pixels or more", "4 x 4"
    ),
    "PyTorch's flag": Mistake(f"{TENSORFLOW} --num-gpus 2", "--num-gpus with PyTorch alone", "2"),
    "PyTorch's strategy": Mistake(
        f"{TENSORFLOW} --strategy fsdp", "--strategy to be one of", "-m allstep.pytorch.train"
    ),
    "a warm-up beyond the run, TensorFlow": Mistake(
        f"{TENSORFLOW} --warmup-epochs 11", "--warmup-epochs to be 0 to 10", "11"
    ),
    "momentum without any, TensorFlow": Mistake(
        f"{TENSORFLOW} --optimizer adagrad --momentum 0.5", "--momentum with --optimizer sgd or", "adagrad"
    ),
    "noise in a compiled step": Mistake(
        f"{TENSORFLOW} --compile --gradient-noise 0.1", "--gradient-noise without --compile in TensorFlow", "both"
    ),
    "an average without common steps": Mistake(
        f"horovodrun -np 2 {TENSORFLOW} --strategy parameter-server --ema 0",
        "a synchronous strategy with --ema",
        "parameter-server",
    ),
    # Under launchers the ranks report it once.
    "two ranks": Mistake(f"horovodrun -np 2 {PYTORCH} --epochs 0", "--epochs to be at least 1", "0"),
    "two ranks of mpirun": Mistake(
        f"mpirun --oversubscribe -np 2 {PYTORCH} --output-dir /proc/allstep", "--output-dir to be a path", "/proc"
    ),
    "more ranks than samples": Mistake(
        f"mpirun --oversubscribe -np 2 {PYTORCH} --dataset synthetic --synthetic-samples 1 --global-batch-size 1",
        "at least one training sample per rank",
        "1 samples",
    ),
    "fewer samples in a batch than ranks": Mistake(
        f"mpirun --oversubscribe -np 2 {PYTORCH} --global-batch-size 1", "--global-batch-size to be at least", "1"
    ),
}


@pytest.mark.parametrize("flags", VALUES, ids=lambda flags: flags[:40])
def test_values(flags):
    """Run in this process, up to where a trainer would import its framework; `test_flags` has whole commands."""
    value = flags.partition(" ")[2]
    received = value if value.strip("' ") else "''"
    with pytest.raises(UserError) as error:
        start(strategies, shlex.split(flags))
    check_line(str(error.value), VALUES[flags], received.strip("'").strip()[:60])


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name, tmp_path):
    check(FLAGS[name], tmp_path)
