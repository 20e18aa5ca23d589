"""Wrong arguments of the commands of `allstep` and of the benchmarks. Oracle: the contract in `mistake`."""

from __future__ import annotations

import os
import sys

import pytest
from mistake import Mistake, check, check_call

HUGE = "1" + 30 * "0"
CORES = "to be at most 16, as they share the"
if len(os.sched_getaffinity(0)) > 16:
    CORES = "as they share the"

# By command: what its line states as expected and received.
COMMANDS = {
    # no such command
    "compere": ("one of the commands compare, hosts", "compere; did you mean compare?"),
    "''": ("one of the commands", "''"),
    "--verbose": ("one of the commands", "--verbose"),
    # no such flag
    "parity --step 3": ("a flag of allstep parity", "--step; did you mean --steps?"),
    "parity now": ("flags and their values", "now"),
    "soak --kill 3": ("a flag of allstep soak", "--kill"),
    "forecast --batch 3": ("a flag of allstep forecast", "--batch"),
    "hosts --slots 3": ("a flag of allstep hosts", "--slots"),
    "collectives --tune=3": ("--tune alone", "it with the value 3"),
    # no value
    "collectives --ranks": ("a value after --ranks", "none"),
    "report": ("DIR", "nothing"),
    "timeline": ("FILE", "nothing"),
    "study": ("NAME", "nothing"),
    "study batch-sise": ("one of the studies", "batch-sise; did you mean batch-size?"),
    "study nosuch.yaml": ("a description of a study", "nosuch.yaml: No such file"),
    "hosts -H": ("a value after -H", "none"),
    # the hosts of the doctor, and the jobs of launch
    "doctor --hosts nosuch": ("a readable hostfile", "nosuch: No such file"),
    "doctor --hosts nosuch -H server1:1": ("--hosts or -H", "both"),
    "doctor -H server1": ("NAME slots=NUMBER or NAME:NUMBER", "'server1'"),
    "doctor -H server1:1,server1:2": ("each host once", "server1 2 times"),
    "doctor --skip ssh": ("--skip to be one of frameworks, data, ports, all-reduce", "ssh"),
    "launch -- pytorch/train.py": ("--slurm", "nothing for it"),
    "launch --slurm": ("pytorch/train.py or tensorflow/train.py with its flags", "nothing"),
    "launch --slurm -- pytorch/train.py": ("--output-dir in the command", "none"),
    # numbers of ranks on this machine
    "collectives --ranks 1000000": (CORES, "1000000"),
    "collectives --ranks 1": ("--ranks to be at least 2", "1"),
    "collectives --ranks two": ("--ranks to be a whole number", "two"),
    f"collectives --ranks {HUGE}": (CORES, HUGE),
    "compare --ranks 1,1000000": ("--ranks to be at most 10000", "1000000"),
    "compare --oversubscribe --ranks 1,999": ("with --oversubscribe on this machine", "999"),
    "compare --ranks 1,,2": ("--ranks to be a whole number", "''"),
    "compare --ranks 0": ("--ranks to be at least 1", "0"),
    "compare --threads-per-rank 1000000": (CORES, "1000000"),
    "parity --ranks 1,1000000": (CORES, "1000000"),
    "soak --ranks 1000000": (CORES, "1000000"),
    # counts
    "study batch-size --seeds 0": ("--seeds to be at least 1", "0"),
    "collectives --sizes 0": ("--sizes to be at least 1", "0"),
    "collectives --sizes 1e6": ("--sizes to be a whole number", "1e6"),
    f"collectives --sizes {HUGE}": ("--sizes to be at most", HUGE),
    "collectives --sizes 1000000000000": ("messages for the", "1000000000000"),
    "collectives --rounds 0": ("--rounds to be at least 1", "0"),
    f"collectives --rounds {HUGE}": ("--rounds to be at most 1000", HUGE),
    f"collectives --time-limit {HUGE}": ("--time-limit to be at most", HUGE),
    "collectives --step-ms 0": ("--step-ms to be at least 1", "0"),
    "compare --models timm:resnet18": ("a network that both frameworks have", "timm:resnet18"),
    "compare --frameworks tensorflow --models timm:resnet18": ("a network of TensorFlow", "timm:resnet18"),
    "compare --models text-encoder": ("one of mlp, cnn", "text-encoder"),
    "compare --models absent.py:build": ("a Python file at absent.py", "none"),
    "compare --repetitions 4": ("--repetitions to be at least 5", "4"),
    f"compare --repetitions {HUGE}": ("--repetitions to be at most 1000", HUGE),
    "compare --batch-sizes 0": ("--batch-sizes to be at least 1", "0"),
    f"compare --batch-sizes {HUGE}": ("--batch-sizes to be at most", HUGE),
    "compare --epochs 1": ("--epochs to be at least 2", "1"),
    f"compare --epochs {HUGE}": ("--epochs to be at most", HUGE),
    f"compare --num-iters {HUGE}": ("--num-iters to be at most", HUGE),
    f"compare --num-batches-per-iter {HUGE}": ("--num-batches-per-iter to be at most", HUGE),
    f"compare --num-warmup-batches {HUGE}": ("--num-warmup-batches to be at most", HUGE),
    f"compare --gate-steps {HUGE}": ("--gate-steps to be at most", HUGE),
    "compare --time-limit 0": ("--time-limit to be at least 1", "0"),
    f"parity --steps {HUGE}": ("--steps to be at most", HUGE),
    "parity --every 0": ("--every to be at least 1", "0"),
    "parity --seed -1": ("--seed to be at least 0", "-1"),
    "soak --kills -1": ("--kills to be at least 0", "-1"),
    f"soak --faults {HUGE}": ("--faults to be at most", HUGE),
    "soak --seed 0.5": ("--seed to be a whole number", "0.5"),
    f"forecast --step-ms 1 --ranks {HUGE}": ("--ranks to be at most", HUGE),
    "forecast --step-ms 1 --ranks 0": ("--ranks to be at least 1", "0"),
    f"forecast --step-ms 1 --parameters {HUGE}": ("--parameters to be at most", HUGE),
    f"forecast --step-ms 1 --batch-size {HUGE}": ("--batch-size to be at most", HUGE),
    f"forecast --step-ms 1 --ranks-per-node {HUGE}": ("--ranks-per-node to be at most", HUGE),
    f"forecast --step-ms 1 --samples {HUGE}": ("--samples to be at most", HUGE),
    # numbers
    "compare --base-lr nan": ("--base-lr to be a number", "nan"),
    "compare --base-lr 0": ("--base-lr to be above 0", "0"),
    "compare --target-accuracy 97": ("--target-accuracy to be at most 1", "97"),
    "compare --target-accuracy nan": ("--target-accuracy to be a number", "nan"),
    "forecast --step-ms nan": ("--step-ms to be a number", "nan"),
    "forecast --step-ms inf": ("--step-ms to be at most", "inf"),
    "forecast --step-ms -1": ("--step-ms to be above 0", "-1"),
    "forecast --step-ms 1e-300": ("--step-ms to be 0 or at least", "1e-300"),
    "forecast --step-ms 1 --cycle-ms 1e-300": ("--cycle-ms to be 0 or at least", "1e-300"),
    "forecast --step-ms 1 --jitter -inf": ("--jitter to be at least 0", "-inf"),
    "forecast --step-ms 1 --backward-share 2": ("--backward-share to be at most 1", "2"),
    "forecast --loss-of-parameters nan": ("--loss-of-parameters to be a number", "nan"),
    # names
    "collectives --backends nccl": ("--backends to be one of memcpy, mpi4py", "nccl"),
    "collectives --collectives sum": ("--collectives to be one of all-reduce", "sum"),
    "collectives --network nosuch": ("--network to be one of", "nosuch"),
    "compare --strategies horovod,dpp": ("--strategies to be one of", "dpp; did you mean ddp?"),
    "compare --frameworks jax": ("--frameworks to be one of pytorch, tensorflow", "jax"),
    "compare --models vgg": ("--models to be one of", "vgg"),
    "compare --precisions fp8": ("--precisions to be one of", "fp8"),
    "compare --workloads weak": ("--workloads to be one of", "weak"),
    "compare --dataset imagenet": ("--dataset to be one of digits", "imagenet"),
    "parity --optimizers sgd,lion": ("--optimizers to be one of", "lion"),
    "parity --ranks 1 --frameworks pytorch --strategies single": ("at least two runs to compare", "1"),
    "soak --frameworks ''": ("--frameworks to be one of", "''"),
    "forecast --step-ms 1 --algorithm star": ("--algorithm to be one of ring", "star"),
    "forecast --step-ms 1 --compression fp8": ("--compression to be one of none, fp16", "fp8"),
    "forecast --step-ms 1 --network nosuch": ("--network to be one of", "nosuch"),
    "forecast": ("the step time of one rank", "none"),
    "forecast --validate --measured .": ("--collectives with --measured", "none"),
    "hosts --to torchrun": ("--to to be one of", "torchrun"),
    # paths
    "compare --output-dir ''": ("--output-dir to be a path", "''"),
    "compare --data-dir ''": ("--data-dir to be a text", "''"),
    "collectives --output ''": ("--output to be a path", "''"),
    "collectives --output /proc/x.json": ("--output to be a file that can be written", "/proc/x.json"),
    "collectives --output new/x.json --rounds 0": ("--rounds to be at least 1", "0"),
    "collectives --output .": ("--output to be a file that can be written", "."),
    "forecast --step-ms 1 --output /proc/x.json": ("--output to be a file that can be written", "/proc/x.json"),
    "forecast --run ''": ("--run to be a path", "''"),
    "forecast --step-ms 1 --collectives ''": ("--collectives to be a path", "''"),
    "report ''": ("DIR to be a path", "''"),
    "timeline ''": ("FILE to be a path", "''"),
}

BENCHMARKS = {
    "benchmarks.observing --rounds 0": ("--rounds to be at least 1", "0"),
    f"benchmarks.observing --rounds {HUGE}": ("--rounds to be at most 1000", HUGE),
    "benchmarks.observing --rounds many": ("--rounds to be a whole number", "many"),
    "benchmarks.overhead --quik": ("a flag of", "--quik; did you mean --quick?"),
    "benchmarks.overhead --frameworks pytorch,jax": ("--frameworks to be one of pytorch, tensorflow", "jax"),
    "benchmarks.overhead --frameworks pytorch tensorflow": ("flags and their values", "tensorflow"),
    "benchmarks.overhead --frameworks pytorch,,tensorflow": ("--frameworks to be one of", "''"),
    "benchmarks.reproducibility one": ("DIR", "nothing"),
    "commands.compare.synthetic --num-iters 0": ("--num-iters to be at least 1", "0"),
    "commands.compare.synthetic --framework jax": ("--framework to be one of", "jax"),
    "commands.compare.synthetic --epoch 3": ("a flag of", "--epoch; did you mean --epochs?"),
    "commands.shared.real --framework jax": ("--framework to be one of", "jax"),
}


PROGRAMS = {**{f"allstep {arguments}": texts for arguments, texts in COMMANDS.items()}, **BENCHMARKS}


@pytest.mark.parametrize("command", PROGRAMS)
def test_calls(command, tmp_path, monkeypatch, capfd):
    check_call(Mistake(command, *PROGRAMS[command]), tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("program", ["commands.cli collectives", "benchmarks.observing"])
def test_processes(program, tmp_path):
    command = f"{sys.executable} -m allstep.{program} --rounds 0"
    check(Mistake(command, "--rounds to be at least 1", "0"), tmp_path)
