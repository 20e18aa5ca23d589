"""Wrong YAML files of flags. Oracle: the contract in `mistake`; the line names the file and the key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mistake import PYTORCH, Mistake, check


def written(content: str | bytes, expected: str, received: str) -> Mistake:
    """Return a mistake in the content of run.yaml."""
    plain = content if isinstance(content, bytes) else content.encode()
    return Mistake(
        f"{PYTORCH} --config run.yaml", expected, received, prepare=lambda here: (here / "run.yaml").write_bytes(plain)
    )


def made(make: object, expected: str, received: str) -> Mistake:
    """Return a mistake where run.yaml is no regular file."""
    return Mistake(f"{PYTORCH} --config run.yaml", expected, received, prepare=lambda here: make(here / "run.yaml"))


# Each line has nine times the values of the line before: 9^13 values.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * [f'*{old}'])}]\n" for old, new in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
READABLE = "a readable YAML file for --config"

MISTAKES = {
    # values
    "true for a number": written("epochs: true\n", "epochs in run.yaml, line 1, to be a whole number", "true"),
    "a word for a number": written("seed: 1\nepochs: soon\n", "epochs in run.yaml, line 2, to be a whole", "soon"),
    "a number in exponents": written("batch_size: 1e3\n", "batch-size in run.yaml, line 1, to be a whole", "1e3"),
    "a hexadecimal number": written("epochs: 0x10\n", "epochs in run.yaml", "0x10"),
    "a sexagesimal number": written("epochs: 1:30\n", "epochs in run.yaml", "1:30"),
    "a date": written("epochs: 2026-11-22\n", "epochs in run.yaml", "2026-11-22"),
    "6,000 digits": written(f"epochs: {6000 * '9'}\n", "epochs in run.yaml", "6000 characters"),
    "not a number": written("base_lr: .nan\n", "base-lr in run.yaml, line 1, to be a number", ".nan"),
    "infinity": written("stall_timeout: .inf\n", "stall-timeout in run.yaml", ".inf"),
    "infinity as Python has it": written("stall_timeout: inf\n", "stall-timeout in run.yaml", "inf"),
    "too small": written("epochs: 0\n", "epochs in run.yaml, line 1, to be at least 1", "0"),
    "no for a name": written("lr_decay: no\n", "lr-decay in run.yaml, line 1, to be one of constant", "no"),
    "off for a name": written("compression: off\n", "compression in run.yaml, line 1, to be one of none", "off"),
    "a number for a switch": written("drop_last: 1\n", "drop-last in run.yaml, line 1, to be true or false", "1"),
    "a list for a number": written("epochs: [1, 2]\n", "epochs in run.yaml, line 1, to be one value", "2 values"),
    "an empty list for a number": written("epochs: []\n", "epochs in run.yaml, line 1, to be one value", "0 values"),
    "a list of one for a number": written("epochs: [0]\n", "epochs in run.yaml, line 1, to be at least 1", "0"),
    "two numbers for a shape": written("synthetic_shape: [9, 7]\n", "synthetic-shape in run.yaml", "2 values"),
    "nothing in a shape": written("synthetic_shape: [9, 7, ~]\n", "a value or a list of them", "nothing"),
    "a list in a list": written("lr_milestones: [[1, 2]]\n", "lr-milestones in run.yaml", "a list"),
    "a mapping for a number": written("epochs: {first: 1}\n", "epochs in run.yaml", "a mapping"),
    "a set": written("model: !!set {cnn, mlp}\n", "model in run.yaml", "the tag tag:yaml.org,2002:set"),
    "an empty text": written("output_dir: ''\n", "output-dir in run.yaml, line 1, to be a path", "''"),
    "a NUL in a path": written('output_dir: "a\\0b"\n', "output-dir in run.yaml, line 1, to be a path", "a\\x00b"),
    "a terminal's commands": written('model: "\\e[31mred\\ngreen"\n', "model in run.yaml", "\\x1b[31mred\\ngreen"),
    "a flag for a value": written("model: --help\n", "model in run.yaml", "--help"),
    "a flag within a list": written("batch_ramp: [5:2, --help]\n", "batch-ramp in run.yaml, line 1", "--help"),
    "a ramp": written("batch_ramp: [5:2, 8]\n", "batch-ramp in run.yaml, line 1, to be EPOCH:FACTOR", "8"),
    # keys
    "a flag that is not there": written("epoch: 3\n", "flags in run.yaml", "epoch in line 1; did you mean epochs?"),
    "a flag with its hyphens": written("--epochs: 3\n", "flags in run.yaml", "--epochs in line 1"),
    "a switch turned": written("no_drop_last: true\n", "flags in run.yaml", "no-drop-last in line 1"),
    "a file within": written("config: other.yaml\n", "flags in run.yaml", "config in line 1"),
    "help": written("help: true\n", "flags in run.yaml", "help in line 1"),
    "groups of flags": written("schedule:\n  epochs: 3\n", "flags in run.yaml", "schedule in line 1"),
    "a number as key": written("3: 4\n", "flags in run.yaml", "3 in line 1"),
    "nothing as key": written("~: 4\n", "flags in run.yaml", "nothing in line 1"),
    "a list as key": written("? [a, b]\n: 4\n", "flags in run.yaml", "a list in line 1"),
    "a mapping as key": written("? {a: b}\n: 4\n", "flags in run.yaml", "a mapping in line 1"),
    "a key of many lines": written('"a\\nb\\e[31m": 4\n', "flags in run.yaml", "'a\\nb\\x1b[31m'"),
    "a key twice": written("epochs: 1\nseed: 1\nepochs: 2\n", "each flag once in run.yaml", "epochs in lines 1 and 3"),
    "a key in two spellings": written("base-lr: 1\nbase_lr: 1\n", "each flag once in run.yaml", "base-lr in lines 1"),
    "a merged mapping": written("<<: {epochs: 3}\n", "flags in run.yaml", "<< in line 1"),
    # tags
    "a command": written("model: !!python/object/apply:os.system ['touch x']\n", "model in run.yaml", "os.system"),
    "an object": written("model: !!python/name:os.system ''\n", "model in run.yaml", "os.system"),
    "a list by tag": written("model: !!seq cnn\n", "model in run.yaml", "the tag"),
    "a text by tag": written("model: !!str {a: b}\n", "model in run.yaml", "the tag"),
    "a binary": written("model: !!binary Y25u\n", "model in run.yaml", "the tag"),
    # the file
    "a bomb of anchors": written(BOMB, "flags in run.yaml", "a in line 1"),
    "a bomb in a flag": written("lr_milestones: [&a [1, 1], &b [*a, *a], [*b, *b]]\n", "lr-milestones in", "a list"),
    "a list that holds itself": written("lr_milestones: &a [*a]\n", "lr-milestones in run.yaml", "a list"),
    "an alias of nothing": written("epochs: *many\n", READABLE, "line 1: found undefined alias 'many'"),
    "deep lists": written("epochs: " + 5000 * "[", READABLE, "nested too deeply"),
    "deep mappings": written(5000 * "{a: ", READABLE, "nested too deeply"),
    "deep blocks": written(5000 * "- ", READABLE, "nested too deeply"),
    "more than flags take": written("# " + 2**16 * "x", READABLE, "run.yaml: expected at most 65536 bytes"),
    "nothing": written("", "lines of `flag: value` in run.yaml", "nothing"),
    "a comment alone": written("# epochs: 3\n", "lines of `flag: value` in run.yaml", "nothing"),
    "a list": written("- epochs\n", "lines of `flag: value` in run.yaml", "a list"),
    "a text": written("epochs 3\n", "lines of `flag: value` in run.yaml", "text"),
    "two documents": written("epochs: 1\n---\nepochs: 2\n", READABLE, "run.yaml, line 2"),
    "an open bracket": written("epochs: [1, 2", READABLE, "run.yaml, line 1"),
    "a tab": written("schedule:\n\tepochs: 3\n", READABLE, "run.yaml, line 2: found character '\\t'"),
    "a NUL": written("epochs: 3\0\n", READABLE, "unacceptable character #x0000"),
    "no text": written(bytes(range(256)), READABLE, "can't decode byte 0x80"),
    "a pipe": made(os.mkfifo, READABLE, "run.yaml: expected a regular file, received a FIFO"),
    "a device": made(lambda path: os.symlink("/dev/zero", path), READABLE, "received a character device"),
    "a folder": made(Path.mkdir, READABLE, "run.yaml: expected a regular file, received a directory"),
    "a link to itself": made(lambda path: os.symlink(path, path), READABLE, "run.yaml: Too many levels"),
    "no file": Mistake(f"{PYTORCH} --config run.yaml", READABLE, "run.yaml: No such file"),
    # with flags
    "a warm-up beyond the run": Mistake(
        f"{PYTORCH} --config run.yaml --epochs 2",
        "--warmup-epochs to be 0 to 2",
        "3",
        prepare=lambda here: (here / "run.yaml").write_text("warmup_epochs: 3\n"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_config_files(name, tmp_path):
    check(MISTAKES[name], tmp_path)
