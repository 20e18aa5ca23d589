"""`allstep hosts`: check a job's hosts, convert them between launcher notations, and print the commands to start it.

    allstep hosts hostfiles/two-servers                   the topology, and the launch line of each launcher
    allstep hosts -H server1:4,server2:4 --to hostfile    the same hosts as a hostfile of horovodrun and Open MPI
    allstep hosts                                         the hosts of a Slurm, PBS or LSF allocation, or of an MPIJob

Notations: a hostfile of horovodrun or Open MPI (`server1 slots=4`), that of a Kubernetes MPIJob (the same, or
`server1:4`), the list after -H (`server1:4,server2:4`), Slurm's SLURM_JOB_NODELIST with SLURM_TASKS_PER_NODE, the file
that PBS names in PBS_NODEFILE (a line per slot), and LSF's LSB_MCPU_HOSTS (`server1 4 server2 4`).
A slot is a rank; ranks fill the hosts in the given order.

Host files may be untrusted, and launchers pass host names to shells. So a name may only consist of letters, digits,
dots, hyphens and underscores.
"""

import os
import re
import shlex
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest
from pathlib import Path

from allstep.common.base.checkout import trainer
from allstep.common.base.errors import UserError, quoted
from allstep.common.base.flag_types import Parser
from allstep.common.files.disk import read_regular
from allstep.common.launch.variables import MAX_PER_HOST, compress, expand_nodelist, tasks_per_node

MPIJOB_HOSTFILE = Path("/etc/mpi/hostfile")  # where the MPI operator of Kubeflow mounts it
MAX_BYTES = 2**20
MASTER_PORT = 29500  # default of torchrun

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ENTRY = re.compile(r"([^\s:]+)(?::|\s+slots\s*=\s*)(\d{1,5})(?:\s+max[-_]slots\s*=\s*\d{1,5})?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """Host with its number of ranks."""

    name: str
    """Name or IPv4 address, without characters that have a meaning in a shell."""
    slots: int
    """Number of ranks, from 1 to `MAX_PER_HOST`."""


def parse_host(text: str, where: str) -> Host:
    """Parse a host from `server1 slots=4` or `server1:4`; `where` is its source for error messages.

    Raises UserError if the text has another form, an invalid character in the name, or an invalid number of slots.
    """
    match = _ENTRY.fullmatch(text)
    if not match:
        raise UserError(
            f"expected NAME slots=NUMBER or NAME:NUMBER in {where}, received {quoted(text)}; write it as in server1:4"
        )
    return _host(match[1], int(match[2]), where)


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of a hostfile, one per line; empty lines and comments after # are ignored.

    Raises UserError if the file cannot be read, is not a regular file or above a mebibyte, or a line is not a host.
    """
    lines = enumerate(_read(path, "hostfile").split("\n"), 1)
    entries = [(number, line.partition("#")[0].strip()) for number, line in lines]
    return [parse_host(entry, f"{path}, line {number}") for number, entry in entries if entry]


def parse_list(text: str) -> list[Host]:
    """Parse the list of hosts that launchers take after -H: `server1:4,server2:4`."""
    return [parse_host(entry.strip(), "-H") for entry in text.split(",")]


def slurm_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Read the hosts of a Slurm allocation from its environment.

    Raises UserError if the list of hosts or that of tasks is missing or wrong, or their lengths differ.
    """
    names = expand_nodelist(environ["SLURM_JOB_NODELIST"])
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(names) != len(tasks):
        raise UserError(
            f"expected as many hosts in SLURM_JOB_NODELIST as numbers in SLURM_TASKS_PER_NODE, received {len(names)} "
            f"and {len(tasks)}; take both from one allocation"
        )
    return [_host(name, slots, "SLURM_JOB_NODELIST") for name, slots in zip(names, tasks, strict=True)]


def pbs_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Read the hosts of a PBS allocation from the file that PBS_NODEFILE names, in which a host has a line per slot.

    Raises UserError if the file cannot be read, or a line is not a host.
    """
    path = Path(environ["PBS_NODEFILE"])
    names = Counter(filter(None, map(str.strip, _read(path, "PBS_NODEFILE").split("\n"))))
    return [_host(name, slots, "PBS_NODEFILE") for name, slots in names.items()]


def lsf_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Read the hosts of an LSF job from LSB_MCPU_HOSTS, which has the name and the slots of each in turn.

    Raises UserError if the variable has another form.
    """
    words = environ["LSB_MCPU_HOSTS"].split()
    pairs = zip_longest(words[::2], words[1::2], fillvalue="")
    return [parse_host(f"{name}:{slots}", "LSB_MCPU_HOSTS") for name, slots in pairs]


def find_hosts(environ: Mapping[str, str] = os.environ, mpijob: Path = MPIJOB_HOSTFILE) -> list[Host]:
    """Return the hosts of the allocation or the MPIJob that this process is in; an empty list if it is in neither.

    Raises UserError if the description of the hosts is wrong.
    """
    readers = {"SLURM_JOB_NODELIST": slurm_hosts, "PBS_NODEFILE": pbs_hosts, "LSB_MCPU_HOSTS": lsf_hosts}
    for variable, read in readers.items():
        if variable in environ:
            return read(environ)
    if mpijob.exists():
        return read_hostfile(mpijob)
    return []


def given_hosts(hostfile: Path | None, text: str | None, *, name: str) -> list[Host]:
    """Return the hosts of a hostfile or of the list after -H, else those of the allocation or the MPIJob, if any.

    `name` is what the command calls its hostfile. Raises UserError if both are given, or one is wrong.
    """
    if hostfile and text is not None:
        raise UserError(f"expected {name} or -H, received both; give one of them")
    if hostfile is None and text is None:
        return find_hosts()
    hosts = read_hostfile(hostfile) if hostfile else parse_list(text or "")
    check(hosts)
    return hosts


def check(hosts: Sequence[Host]) -> None:
    """Refuse a list of hosts that no launcher accepts: an empty one, or one with a host twice."""
    if not hosts:
        raise UserError("expected at least one host, received none; give one as in server1:4")
    [(name, times)] = Counter(host.name.lower() for host in hosts).most_common(1)
    if times > 1:
        raise UserError(f"expected each host once, received {name} {times} times; add its slots up in one entry")


def check_names(hosts: Sequence[Host]) -> None:
    """Refuse hosts whose names this machine cannot resolve to different addresses.

    With two names of one address, launchers would count local ranks wrong.
    """
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        addresses = list(pool.map(_address, hosts))
    known: dict[str, str] = {}
    for host, address in zip(hosts, addresses, strict=True):
        if address is None:
            raise UserError(
                f"expected names that this machine resolves, received {host.name}; correct it, or give --no-resolve "
                "where only the cluster knows its hosts"
            )
        if address in known:
            raise UserError(
                f"expected each host once, received {known[address]} and {host.name} for the one at {address}; "
                "add its slots up in one entry"
            )
        known[address] = host.name


def to_hostfile(hosts: Sequence[Host]) -> str:
    """Format hosts for a hostfile of horovodrun, Open MPI, or an MPIJob that runs Open MPI."""
    return "\n".join(f"{host.name} slots={host.slots}" for host in hosts)


def to_list(hosts: Sequence[Host]) -> str:
    """Format hosts for the flag -H of launchers."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def to_slurm(hosts: Sequence[Host]) -> str:
    """Format hosts as environment variables of a Slurm allocation, quoted for a shell."""
    groups = [(slots, len(list(group))) for slots, group in groupby(host.slots for host in hosts)]
    tasks = ",".join(f"{slots}(x{times})" if times > 1 else f"{slots}" for slots, times in groups)
    variables = {"SLURM_JOB_NODELIST": compress([host.name for host in hosts]), "SLURM_TASKS_PER_NODE": tasks}
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


FORMS: dict[str, Callable[[Sequence[Host]], str]] = {
    "hostfile": to_hostfile,
    "horovodrun": to_hostfile,
    "openmpi": to_hostfile,
    "mpijob": to_hostfile,
    "mpich": lambda hosts: to_list(hosts).replace(",", "\n"),  # a hostfile of Intel MPI or MPICH
    "H": to_list,
    "slurm": to_slurm,
}


def topology(hosts: Sequence[Host]) -> str:
    """Describe which ranks are on which host, in a line per host."""
    width = max(len(host.name) for host in hosts)
    firsts = accumulate([0, *(host.slots for host in hosts)])
    lines = [f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {sum(host.slots for host in hosts)} ranks"]
    for host, first in zip(hosts, firsts, strict=False):
        last = first + host.slots - 1
        ranks = f"ranks {first}-{last}" if last > first else f"rank {first}"
        lines.append(f"  {host.name:{width}}  slots={host.slots}  {ranks}")
    return "\n".join(lines)


def launch_lines(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the commands that start the PyTorch trainer on `hosts`, by launcher; torchrun needs one on each host."""
    num_ranks, program = str(sum(host.slots for host in hosts)), trainer("pytorch")
    python = ("python", *program)
    on_hosts = ("-np", num_ranks, "-H", to_list(hosts))
    lines = {
        "horovodrun, MPI": ("horovodrun", *on_hosts, *python),
        "horovodrun, Gloo": ("horovodrun", "--gloo", *on_hosts, *python),
        # With -x, ranks on other hosts find the python that is first on the PATH here.
        "mpirun": ("mpirun", *on_hosts, "--bind-to", "none", "-x", "PATH", *python),
    }
    ddp = ("--strategy", "ddp")
    if len({host.slots for host in hosts}) == 1:  # srun starts the same number of tasks on all hosts
        nodes = ("--nodelist", compress([host.name for host in hosts]), "--ntasks-per-node", str(hosts[0].slots))
        lines["srun"] = ("srun", *nodes, "--ntasks", num_ranks, *python, *ddp)
    for number, host in enumerate(hosts):
        rendezvous = ("--master-addr", hosts[0].name, "--master-port", str(MASTER_PORT))
        nodes = (
            ("--nnodes", str(len(hosts)), "--node-rank", str(number), *rendezvous) if hosts[1:] else ("--standalone",)
        )
        nodes = (*nodes, "--nproc-per-node", str(host.slots))
        lines[f"torchrun on {host.name}"] = ("torchrun", *nodes, *program, *ddp)
    return {launcher: shlex.join(words) for launcher, words in lines.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `allstep hosts`. Raises UserError if arguments or environment do not describe valid hosts."""
    parser = Parser("allstep hosts", __doc__)
    parser.add_argument("hostfile", nargs="?", type=Path, metavar="FILE", help="a hostfile")
    parser.add_argument("-H", dest="hosts", metavar="LIST", help="hosts as in server1:4,server2:4")
    parser.add_argument("--to", choices=tuple(FORMS), metavar="FORM", help=f"print in one of {', '.join(FORMS)}")
    parser.add_argument("--no-resolve", action="store_true", help="do not check that this machine resolves the names")
    flags = parser.parse_args(argv)
    hosts = given_hosts(flags.hostfile, flags.hosts, name="a hostfile")
    if not hosts:
        raise UserError(
            "expected a hostfile, -H, an allocation of Slurm, PBS or LSF, or an MPIJob, received none of them; give "
            "the hosts as in -H server1:4,server2:4"
        )
    check(hosts)
    if not flags.no_resolve:
        check_names(hosts)
    if flags.to:
        print(FORMS[flags.to](hosts))
        return
    lines = launch_lines(hosts)
    width = max(map(len, lines))
    print(topology(hosts), "", *(f"{launcher:{width}}  {line}" for launcher, line in lines.items()), sep="\n")


def _read(path: Path, what: str) -> str:
    try:
        return read_regular(path, maximum=MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise UserError(f"expected a readable {what}, received {path}: {error.strerror}; name another") from None


def _host(name: str, slots: int, where: str) -> Host:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"expected a host name in {where} of letters, digits, dots, hyphens and underscores, and neither first nor "
            f"last but a letter or a digit, received {quoted(name)}; correct it"
        )
    if not 1 <= slots <= MAX_PER_HOST:
        raise UserError(
            f"expected from 1 to {MAX_PER_HOST} slots in {where}, received {slots} for {name}; give one for each GPU "
            "or core, or leave the host out"
        )
    return Host(name, slots)


def _address(host: Host) -> str | None:
    try:
        return socket.gethostbyname(host.name)
    except (OSError, UnicodeError):  # the latter for a label above 63 characters
        return None
