"""Wrong arguments of horovodrun itself. Oracle: the contract of mistakes, in `mistake.check`.

No case starts a rank except those at the end, which are about elastic jobs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from mistake import PYTORCH, TENSORFLOW, Mistake, check

RUN = f"horovodrun -np 2 {sys.executable} -c pass"


def runs(options: str) -> str:
    return f"horovodrun {options} {sys.executable} -c pass"


def file(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Return a function that writes one file into the folder."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def script(name: str, content: str) -> Callable[[Path], object]:
    def prepare(folder: Path) -> None:
        file(name, f"#!/bin/sh\n{content}\n")(folder)
        (folder / name).chmod(0o755)

    return prepare


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def hostfile(content: str | bytes, expected: str, received: str) -> Mistake:
    return Mistake(runs("-np 2 --hostfile hosts"), expected, received, prepare=file("hosts", content))


def config(content: str, expected: str, received: str) -> Mistake:
    return Mistake(runs("-np 2 --config-file config.yaml"), expected, received, prepare=file("config.yaml", content))


def hosts(text: str, expected: str, received: str) -> Mistake:
    return Mistake(runs(f"-np 2 -H={shlex.quote(text)}"), expected, received)


MISTAKES = {
    # Numbers of processes.
    "no -np": Mistake(runs(""), "-np NUMBER", "none"),
    "-np without a number": Mistake("horovodrun -np", "a value for -np", "none"),
    "-np abc": Mistake(runs("-np abc"), "a whole number for -np", "'abc'"),
    "-np 2.5": Mistake(runs("-np 2.5"), "a whole number for -np", "'2.5'"),
    "-np 0": Mistake(runs("-np 0"), "-np of at least 1", "0"),
    "-np -3": Mistake(runs("-np -3"), "-np of at least 1", "-3"),
    "-np 1000000": Mistake(runs("-np 1000000"), "-np of at most", "1000000"),
    "-np 5000": Mistake(runs("-np 5000"), "at most 1024 processes on one host", "5000"),
    "-np of 10 digits": Mistake(runs("-np 9999999999"), "-np of", "9999999999"),
    "more processes than slots": Mistake(runs("-np 3 -H localhost:2"), "at most 2 processes", "-np 3"),
    "more processes than slots, Gloo": Mistake(runs("--gloo -np 3 -H localhost:2"), "at most 2 processes", "-np 3"),
    # Commands.
    "nothing": Mistake("horovodrun", "-np NUMBER", "none"),
    "no command": Mistake("horovodrun -np 2", "a command to run", "none"),
    "unknown command": Mistake("horovodrun -np 2 pyhton train.py", "a program", "'pyhton'"),
    "unknown command, Gloo": Mistake("horovodrun --gloo -np 2 pyhton train.py", "a program", "'pyhton'"),
    "a script in place of a program": Mistake(
        "horovodrun -np 2 train.py", "a program", "'train.py'", prepare=file("train.py", "pass")
    ),
    "a folder in place of a program": Mistake("horovodrun -np 2 /usr", "a program", "'/usr'"),
    "unknown option": Mistake(runs("-np 2 --fast"), "options of horovodrun", "--fast"),
    "option of the command before it": Mistake(f"horovodrun -np 2 --epochs 3 {PYTORCH}", "options", "--epochs"),
    # Hosts after -H.
    "host without slots": hosts("server1", "NAME:SLOTS", "'server1'"),
    "no host": hosts("", "NAME:SLOTS", "''"),
    "host named like an option": hosts("-V:2", "a host name", "'-V'"),
    "host named like ssh's ProxyCommand": hosts("-oProxyCommand=touch$IFS.x:2", "a host name", "-oProxyCommand"),
    "host with a command": hosts("$(touch x):2", "NAME:SLOTS", "$(touch x)"),
    "host with a command without spaces": hosts("$(id):2", "a host name", "$(id)"),
    "host with backquotes": hosts("`id`:2", "a host name", "`id`"),
    "host with a semicolon": hosts("server1;id:2", "a host name", "server1;id"),
    "host with an ampersand": hosts("server1&id:2", "a host name", "server1&id"),
    "host with a line end": hosts("localhost\nid:2", "NAME:SLOTS", "localhost\\nid"),
    "host in other letters": hosts("sérver:2", "a host name", "s\\xe9rver"),
    "host name without end": hosts("a" * 300 + ":2", "a host name", "aaaa"),
    "slots 0": hosts("localhost:0", "1 to 1024 slots for localhost", "0"),
    "slots -1": hosts("localhost:-1", "NAME:SLOTS", "localhost:-1"),
    "slots many": hosts("localhost:many", "NAME:SLOTS", "localhost:many"),
    "slots 99999": hosts("localhost:99999", "1 to 1024 slots", "99999"),
    "slots of 6000 digits": hosts("localhost:" + "9" * 6000, "NAME:SLOTS", "localhost:999"),
    "host given twice": hosts("localhost:1,localhost:1", "each host once", "localhost"),
    "host file without a name": Mistake(runs("-np 2 --hostfile ''"), "a host file", "''"),
    "comma at the end": hosts("localhost:2,", "NAME:SLOTS", "''"),
    "hosts by -H and by a file": Mistake(
        runs("-np 2 -H localhost:2 --hostfile hosts"), "-H", "both", prepare=file("hosts", "localhost slots=2\n")
    ),
    # Host files.
    "host file missing": Mistake(runs("-np 2 --hostfile nowhere"), "a host file", "'nowhere'"),
    "host file is a folder": Mistake(runs("-np 2 --hostfile /tmp"), "a host file", "no regular file"),
    "host file is a FIFO": Mistake(
        runs("-np 2 --hostfile pipe"), "a host file", "no regular file", prepare=fifo
    ),
    "host file without end": Mistake(runs("-np 2 --hostfile /dev/zero"), "a host file", "no regular file"),
    "host file of 2 MiB": hostfile("#" * 2**21, "a host file of at most", "more in hosts"),
    "host file without hosts": hostfile("\n# none\n", "a host in hosts", "none"),
    "host file with a line without slots": hostfile("localhost slots=1\nserver1\n", "hosts, line 2", "'server1'"),
    "host file with a word in place of slots": hostfile("server1 slots=two\n", "line 1", "slots=two"),
    "host file with a command": hostfile("localhost;id slots=2\n", "a host name", "localhost;id"),
    "host file of bytes": hostfile(b"\0\xff\xfe" * 20, "hosts, line 1", "\\x00"),
    "host file with a host twice": hostfile("localhost slots=1\n" * 2, "each host once", "localhost"),
    # Configuration files.
    "configuration missing": Mistake(runs("-np 2 --config-file x.yaml"), "a configuration file", "'x.yaml'"),
    "configuration is a FIFO": Mistake(
        runs("-np 2 --config-file pipe"), "YAML", "no regular file", prepare=fifo
    ),
    "configuration is no YAML": config("{", "YAML in config.yaml", "something else"),
    "configuration runs something": config("!!python/object/apply:os.system ['touch x']", "YAML", "constructor"),
    "configuration nested 50000 deep": config("[" * 50000, "YAML in config.yaml", "lists in lists"),
    "configuration is a list": config("- params\n", "sections such as params", "['params']"),
    "configuration is empty": config("", "sections such as params", "None"),
    "configuration that means gigabytes": config(
        "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz")),
        "YAML in config.yaml",
        "aliases",
    ),
    "configuration of 100 KB": config("#" * 100_000, "at most", "more in config.yaml"),
    "value is a list": config("params: {cycle_time_ms: [1, 2]}\n", "a number for --cycle-time-ms", "[1, 2]"),
    "file name is a number": config("timeline: {filename: 3}\n", "a word for --timeline-filename", "3"),
    "unknown section": config("parms: {}\n", "one of controller, params", "'parms'"),
    "unknown key": config("params: {fusion_treshold_mb: 3}\n", "fusion_threshold_mb", "'fusion_treshold_mb'"),
    "section is a number": config("params: 3\n", "under params", "3"),
    "value is a word": config("params: {cycle_time_ms: fast}\n", "a number for --cycle-time-ms", "'fast'"),
    "value is an integer of 6000 digits": config("params: {cycle_time_ms: " + "9" * 6000 + "}\n", "YAML", "4300"),
    "value is nan": config("params: {cycle_time_ms: .nan}\n", "--cycle-time-ms", "nan"),
    "value is negative": config("params: {cache_capacity: -1}\n", "--cache-capacity of at least 0", "-1"),
    "switch is a word": config("params: {hierarchical_allreduce: maybe}\n", "true or false", "'maybe'"),
    "enabled is a word": config("autotune: {enabled: maybe}\n", "true or false for enabled", "'maybe'"),
    "unknown controller": config("controller: smoke\n", "mpi or gloo", "'smoke'"),
    "unknown level": config("logging: {level: LOUD}\n", "one of TRACE", "'LOUD'"),
    # Other options.
    "fusion threshold negative": Mistake(runs("-np 2 --fusion-threshold-mb -1"), "--fusion-threshold-mb", "-1"),
    "cycle time inf": Mistake(runs("-np 2 --cycle-time-ms inf"), "--cycle-time-ms of less than", "inf"),
    "noise 2": Mistake(runs("-np 2 --autotune-gaussian-process-noise 2"), "from 0 to 1", "2"),
    "log level": Mistake(runs("-np 2 --log-level LOUD"), "for --log-level", "'LOUD'"),
    "both controllers": Mistake(runs("-np 2 --gloo --mpi"), "--gloo", "both"),
    "ssh port 0": Mistake(runs("-np 2 -p 0"), "--ssh-port of at least 1", "0"),
    "ssh port 70000": Mistake(runs("-np 2 -p 70000"), "--ssh-port below", "70000"),
    "identity missing": Mistake(runs("-np 2 -i nowhere"), "a file for --ssh-identity-file", "'nowhere'"),
    "start timeout 0": Mistake(runs("-np 2 --start-timeout 0"), "--start-timeout", "0"),
    "start timeout abc": Mistake(RUN, "HOROVOD_START_TIMEOUT", "'abc'", environ={"HOROVOD_START_TIMEOUT": "abc"}),
    "Gloo's timeout abc": Mistake(RUN, "SECONDS", "'abc'", environ={"HOROVOD_GLOO_TIMEOUT_SECONDS": "abc"}),
    "unknown interface": Mistake(runs("--gloo -np 2 --network-interfaces eth77"), "a network interface", "'eth77'"),
    "interface with a command": Mistake(
        runs("-np 2 --network-interfaces '$(touch x)'"), "a network interface", "'$(touch x)'"
    ),
    "output in a file": Mistake(
        runs("-np 2 --output-filename out/x"), "a folder to write", "'out/x'", prepare=file("out", "")
    ),
    # Timelines that horovodrun silently failed to write.
    "timeline in a folder that is not": Mistake(
        runs("-np 2 --timeline-filename nowhere/t.json"), "a file to write for --timeline-filename", "'nowhere/t.json'"
    ),
    "timeline is a folder": Mistake(runs("-np 2 --timeline-filename /tmp"), "a file to write", "'/tmp'"),
    "timeline of the environment": Mistake(
        RUN, "a file to write for HOROVOD_TIMELINE", "'nowhere/t.json'", environ={"HOROVOD_TIMELINE": "nowhere/t.json"}
    ),
    "timeline of the environment, without horovodrun": Mistake(
        f"{PYTORCH} --strategy horovod",
        "a file to write for Horovod's timeline",
        "nowhere/t.json",
        environ={"HOROVOD_TIMELINE": "nowhere/t.json"},
    ),
    "timeline of a configuration": config(
        "timeline: {filename: nowhere/t.json}\n", "a file to write for --timeline-filename", "'nowhere/t.json'"
    ),
    # Elastic jobs.
    "elastic on one host": Mistake(runs("-np 2 --min-np 2 -H localhost:2"), "two hosts or more", "localhost:2"),
    "at most fewer than at least": Mistake(runs("-np 2 --min-np 2 --max-np 1"), "--max-np of at least 2", "1"),
    "--max-np alone": Mistake(runs("-np 2 --max-np 4"), "--min-np", "--max-np 4"),
    "no failure allowed": Mistake(runs("-np 2 --max-host-failures 0"), "--max-host-failures of at least 1", "0"),
    "cooldown that ends before it begins": Mistake(
        runs("-np 2 --blacklist-cooldown-range 9 2"), "for --blacklist-cooldown-range, the smaller one first", "9 2"
    ),
    "discovery fails": Mistake(
        runs("-np 2 --min-np 2 --host-discovery-script ./discover"),
        "a host discovery script that ends with status 0",
        "7",
        prepare=script("discover", "exit 7"),
    ),
    "discovery is no program": Mistake(
        runs("-np 2 --host-discovery-script ./nowhere"), "a program for --host-discovery-script", "'./nowhere'"
    ),
    "discovery names an option": Mistake(
        runs("-np 2 --host-discovery-script ./discover"), "a host name", "-V", prepare=script("discover", "echo -V:2")
    ),
    "discovery names a command": Mistake(
        runs("-np 2 --host-discovery-script ./discover"),
        "NAME:SLOTS",
        "$(touch x)",
        prepare=script("discover", "echo '$(touch x):2'"),
    ),
    # With the trainers.
    "elastic, PyTorch": Mistake(
        f"horovodrun -np 2 --min-np 2 --host-discovery-script ./discover {PYTORCH}",
        "--elastic in an elastic job",
        "an elastic one without",
        prepare=script("discover", "echo localhost:2"),
    ),
    "--elastic without a global batch size": Mistake(
        f"horovodrun -np 2 --min-np 2 --host-discovery-script ./discover {PYTORCH} --elastic",
        "--global-batch-size with --elastic",
        "none",
        prepare=script("discover", "echo localhost:2"),
    ),
    "elastic by hosts, TensorFlow": Mistake(
        f"horovodrun -np 2 --min-np 1 --max-np 2 -H localhost:1,127.0.0.1:1 {TENSORFLOW}",
        "--elastic in an elastic job",
        "an elastic one without",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_horovodrun(name, tmp_path):
    check(MISTAKES[name], tmp_path)
