"""Wrong host files and lists of hosts, given to `allstep hosts`. Oracle: the contract in `mistake.check`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mistake import Mistake, check

HOSTS = "allstep hosts"


def written(content: str | bytes) -> Callable[[Path], object]:
    """Return a function that writes a host file into the folder."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    return lambda folder: (folder / "hosts").write_bytes(data)


def hostfile(content: str | bytes, expected: str, received: str) -> Mistake:
    return Mistake(f"{HOSTS} {{here}}/hosts --no-resolve", expected, received, prepare=written(content))


def slurm(nodes: str, tasks: str, expected: str, received: str) -> Mistake:
    return Mistake(HOSTS, expected, received, {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})


MISTAKES = {
    "a line without slots": hostfile("server1\n", "NAME slots=NUMBER or NAME:NUMBER", "'server1'"),
    "no number of slots": hostfile("server1 slots=\n", "NAME slots=NUMBER", "'server1 slots='"),
    "slots negative": hostfile("server1 slots=-1", "NAME slots=NUMBER", "slots=-1"),
    "slots 0": hostfile("server1 slots=0", "from 1 to 8192 slots", "0 for server1"),
    "99,999 slots": hostfile("server1 slots=99999", "from 1 to 8192 slots", "99999 for server1"),
    "slots of 5,000 digits": hostfile("server1 slots=" + "9" * 5000, "NAME slots=NUMBER", "(5014 characters)"),
    "slots in Arabic": hostfile("server1 slots=\u0664", "NAME slots=NUMBER", "\\u0664"),
    "slots twice": hostfile("server1 slots=4 slots=4", "NAME slots=NUMBER", "slots=4 slots=4"),
    "a wrong line among right ones": hostfile(
        "server1 slots=4\n\nserver 2 slots=4", "NAME slots=NUMBER or NAME:NUMBER in", "'server 2 slots=4'"
    ),
    "a host twice": hostfile("server1 slots=4\nSERVER1 slots=4", "each host once", "server1 2 times"),
    "an option as a name": hostfile("-V slots=1", "a host name in", "'-V'"),
    "a command as a name": hostfile("$(reboot) slots=1", "a host name in", "'$(reboot)'"),
    "an escape sequence as a name": hostfile("a\x1b[2J slots=1", "a host name in", "'a\\x1b[2J'"),
    "a name of 254 characters": hostfile("a" * 254 + " slots=1", "a host name in", "(254 characters)"),
    "an empty file": hostfile("", "at least one host", "none"),
    "comments alone": hostfile("# none\n\n", "at least one host", "none"),
    "bytes that are no text": hostfile(b"\xff\xfe\x00 slots=1", "a host name in", "'\\ufffd"),
    "a file above a mebibyte": hostfile("x" * (2**20 + 1), "a readable hostfile", "at most 1048576 bytes, received"),
    "no file": Mistake(f"{HOSTS} {{here}}/none", "a readable hostfile", "{here}/none"),
    "a folder": Mistake(f"{HOSTS} {{here}}", "a readable hostfile", "{here}"),
    "a pipe that nobody writes to": Mistake(
        f"{HOSTS} {{here}}/pipe", "a readable hostfile", "a FIFO", prepare=lambda folder: os.mkfifo(folder / "pipe")
    ),
    "a device without an end": Mistake(f"{HOSTS} /dev/zero", "a readable hostfile", "a character device"),
    "an empty list": Mistake(f"{HOSTS} -H ''", "NAME slots=NUMBER or NAME:NUMBER in -H", "''"),
    "a list with a comma at its end": Mistake(f"{HOSTS} -H a:1,", "NAME slots=NUMBER or NAME:NUMBER in -H", "''"),
    "99,999 slots in a list": Mistake(f"{HOSTS} -H server1:99999", "from 1 to 8192 slots", "99999 for server1"),
    "a list and a file": Mistake(f"{HOSTS} -H a:1 {{here}}/hosts", "a hostfile or -H", "both"),
    "no hosts": Mistake(HOSTS, "a hostfile, -H, an allocation of Slurm, PBS or LSF, or an MPIJob", "none of them"),
    "a name that nobody knows": Mistake(
        f"{HOSTS} -H no-such-host.invalid:1", "names that this machine resolves", "no-such-host.invalid"
    ),
    "a host by two names": Mistake(
        f"{HOSTS} -H localhost:1,127.0.0.1:1", "each host once", "localhost and 127.0.0.1"
    ),
    "Slurm's list without its tasks": slurm("server[1-2]", "", "tasks per node as in 4(x2),3", "''"),
    "Slurm's list and tasks of another": slurm("server[1-2]", "4", "as many hosts", "2 and 1"),
    "Slurm's list unclosed": slurm("server[1-2", "4(x2)", "a list of hosts as in", "'server[1-2'"),
    "Slurm's list empty": slurm("", "4", "a list of hosts as in", "''"),
    "Slurm's list backwards": slurm("server[2-1]", "4", "a span of host numbers", "'2-1'"),
    "Slurm's list of a command": slurm("$(reboot)", "4", "a host name in SLURM_JOB_NODELIST", "'$(reboot)'"),
    "Slurm's list that fills the memory": slurm("n[1-99999][1-99999]", "4", "a list of hosts", "more than 65536"),
    "Slurm's list of long names": slurm("n" * 99999 + "[1-60000]", "4", "a list of hosts", "more than 253"),
    "Slurm's tasks 0": slurm("server1", "0", "from 1 to 8192 slots", "0 for server1"),
    "Slurm's tasks 99999": slurm("server1", "99999", "from 1 to 8192 slots", "99999 for server1"),
    "Slurm's tasks in Arabic": slurm("server1", "\u0664", "tasks per node", "'\\u0664'"),
    "Slurm's tasks that fill the memory": slurm("a", ",".join(["9(x99999)"] * 9999), "tasks per node", "'9(x99999)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_host_files(name, tmp_path):
    check(MISTAKES[name], tmp_path)
