"""`allstep hosts`. Oracles: Horovod's parser, bash, the manuals of Slurm and Open MPI, and round trips."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess

import pytest
from horovod.runner.common.util.hosts import parse_host_files, parse_hosts_and_slots
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY, run

from allstep.commands.hosts import command as hosts
from allstep.commands.hosts.command import (
    Host,
    given_hosts,
)
from allstep.common.base.errors import UserError
from allstep.common.launch.variables import compress, expand_nodelist

TWO = [Host("server1", 4), Host("server2", 4)]
HOSTILE_NAMES = [
    *(f"a{character}b" for character in "$;`!\"'()*+,/:<=>?@[\\]^{|}~%&# \t"),
    "$(touch hacked)",
    "`touch${IFS}hacked`",
    "a;touch${IFS}hacked",
    "'a'",
    '"a"',
    "-oProxyCommand=touch",
    "-a",
    "a-",
    ".a",
    "../a",
    "a\x1b[2J",
    "a\u202eb",
    "sérver",
    "\N{FULLWIDTH DIGIT ONE}",
    "a" * 254,
    "a\0b",
    "*",
    "~",
    "{a,b}",
    "",
]

names = st.from_regex(r"[a-z][a-z0-9._-]{0,8}[0-9]{0,3}[a-z0-9]", fullmatch=True)
jobs = st.lists(st.builds(Host, names, st.integers(1, 9)), min_size=1, max_size=12, unique_by=lambda host: host.name)


def read_back(form: str, text: str, directory) -> list[Host]:
    """Return the hosts that our parsers read from a text in one of the notations."""
    if form == "H":
        return hosts.parse_list(text)
    if form == "slurm":
        return hosts.slurm_hosts(dict(word.split("=", 1) for word in shlex.split(text)))
    path = directory / "hostfile"
    path.write_text(text + "\n")
    return hosts.read_hostfile(path)


@pytest.mark.parametrize("form", hosts.FORMS)
@given(job=jobs)
def test_there_and_back(form, job, tmp_path_factory):
    assert read_back(form, hosts.FORMS[form](job), tmp_path_factory.getbasetemp()) == job


@given(job=jobs)
def test_horovod_reads_what_is_written(job, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "horovod"
    path.write_text(hosts.to_hostfile(job) + "\n")
    expected = ([host.name for host in job], {host.name: host.slots for host in job})
    assert parse_hosts_and_slots(parse_host_files(str(path))) == expected
    assert parse_hosts_and_slots(hosts.to_list(job)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server1 slots=4\nserver2 slots=4\n", TWO),
        ("# both\n\nserver1   slots = 4  # rack 3\r\nserver2 slots=4 max-slots=8", TWO),
        ("server1:4\nserver2:4\n", TWO),  # from an MPIJob with Intel MPI
        ("job-worker-0.job.default.svc slots=2\n", [Host("job-worker-0.job.default.svc", 2)]),
        ("10.0.0.7 slots=1", [Host("10.0.0.7", 1)]),
    ],
)
def test_hostfiles(text, expected, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hosts.read_hostfile(path) == expected


@pytest.mark.parametrize(("name", "num_ranks"), [("localhost", 4), ("two-servers", 8)])
def test_files_of_the_repository(name, num_ranks):
    path = REPOSITORY / "hostfiles" / name
    job = hosts.read_hostfile(path)
    assert sum(host.slots for host in job) == num_ranks
    assert parse_hosts_and_slots(parse_host_files(str(path)))[0] == [host.name for host in job]


def test_slurm():
    """The example is from the manual of sbatch: SLURM_TASKS_PER_NODE."""
    environ = {"SLURM_JOB_NODELIST": "gpu[01-03,7],login", "SLURM_TASKS_PER_NODE": "4(x3),3,1"}
    expected = [Host("gpu01", 4), Host("gpu02", 4), Host("gpu03", 4), Host("gpu7", 3), Host("login", 1)]
    assert hosts.slurm_hosts(environ) == expected
    assert hosts.to_slurm(expected) == "SLURM_JOB_NODELIST='gpu[01-03,7],login'\nSLURM_TASKS_PER_NODE='4(x3),3,1'"


@pytest.mark.parametrize(
    ("names", "compact"),
    [
        (["a"], "a"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n8", "n09", "n10"], "n[8,09-10]"),
        (["n2", "n1"], "n[2,1]"),
        (["login", "login1", "login2"], "login,login[1-2]"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
    ],
)
def test_compact_list(names, compact):
    assert compress(names) == compact
    assert expand_nodelist(compact) == names


def test_the_allocation_around_us(tmp_path):
    mpijob = tmp_path / "hostfile"
    slurm = {"SLURM_JOB_NODELIST": "server[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert hosts.find_hosts({}, mpijob) == []
    mpijob.write_text("worker-0.job.svc slots=1\n")
    assert hosts.find_hosts({}, mpijob) == [Host("worker-0.job.svc", 1)]
    assert hosts.find_hosts(slurm, mpijob) == TWO
    # As Open PBS 23 and Spectrum LSF 10.1 write them (qsub, bsub in their reference guides).
    nodes = tmp_path / "nodes"
    nodes.write_text("server1\n" * 4 + "server2\n" * 4)
    assert hosts.find_hosts({"PBS_NODEFILE": str(nodes)}, mpijob) == TWO
    assert hosts.find_hosts({"LSB_MCPU_HOSTS": "server1 4 server2 4 "}, mpijob) == TWO


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PBS_NODEFILE": "/nowhere"}, "expected a readable PBS_NODEFILE, received /nowhere"),
        ({"LSB_MCPU_HOSTS": "server1 4 server2"}, "in LSB_MCPU_HOSTS, received 'server2:'"),
        ({"LSB_MCPU_HOSTS": "server1 $(reboot)"}, "in LSB_MCPU_HOSTS, received 'server1:$(reboot)'"),
        ({"LSB_MCPU_HOSTS": "-oProxyCommand=x 1"}, "a host name in LSB_MCPU_HOSTS"),
    ],
)
def test_allocations_that_are_wrong(environ, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        hosts.find_hosts(environ, tmp_path / "none")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_go_no_further(name, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"server1 slots=4\n{name} slots=4\n")
    sources = [
        lambda: hosts.read_hostfile(path),
        lambda: hosts.parse_list(f"server1:4,{name}:4"),
        lambda: hosts.slurm_hosts({"SLURM_JOB_NODELIST": f"server1,{name}", "SLURM_TASKS_PER_NODE": "4(x2)"}),
    ]
    for read in sources:
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).isprintable() and str(error.value).isascii() and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server1", "NAME slots=NUMBER"),
        ("server1 slots=", "NAME slots=NUMBER"),
        ("server1 slots=-1", "NAME slots=NUMBER"),
        ("server1 slots=four", "NAME slots=NUMBER"),
        ("server1 slots=4 slots=4", "NAME slots=NUMBER"),
        ("server1 slots=0", "from 1 to 8192 slots"),
        ("server1 slots=" + "9" * 5000, "NAME slots=NUMBER"),
        ("server1 slots=4\n\nserver 2 slots=4", "line 3"),
        ("\n# none\n", "at least one host"),
        ("server1 slots=4\nSERVER1 slots=4", "server1 2 times"),
        ("x" * (hosts.MAX_BYTES + 1), f"{hosts.MAX_BYTES} bytes"),
    ],
)
def test_mistakes_in_a_hostfile(text, said, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        hosts.check(hosts.read_hostfile(path))


@pytest.mark.parametrize("path", ["/nonexistent", "/proc/self", "/dev/zero"])
def test_unreadable_hostfiles(path):
    with pytest.raises(UserError, match=path):
        hosts.read_hostfile(hosts.Path(path))


@pytest.mark.parametrize(
    ("nodes", "tasks"),
    [
        ("server[1-2]", "4"),
        ("server[1-2]", ""),
        ("server[1-2", "4(x2)"),
        ("server[2-1]", "4"),
        ("server[]", "4"),
        ("server1,", "4(x2)"),
        ("server[1-99999999999]", "4"),
        ("r[1-9999]n[1-9999]", "4"),
        (",".join(["n[1-60000]"] * 1000), "4"),
        ("server[1-2]", "4(x99999999999)"),
        ("server[1-2]", ",".join(["4(x99999)"] * 1000)),
        ("server1", "9" * 5000),
    ],
)
def test_mistakes_in_an_allocation(nodes, tasks):
    """Lists that would fill the memory are refused as well."""
    with pytest.raises(UserError, match="expected"):
        hosts.slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})


@given(text=st.text(st.characters(max_codepoint=255), max_size=9), slots=st.text(max_size=6) | st.just("4"))
def test_whatever_is_read_is_safe_in_a_shell(text, slots):
    """A name is accepted only if quoting it would change nothing."""
    for read in (hosts.parse_list, lambda entry: [hosts.parse_host(entry, "a test")]):
        for entry in (text, f"{text}:{slots}", f"{text} slots={slots}"):
            with contextlib.suppress(UserError):
                assert all(shlex.quote(host.name) == host.name and host.name[0].isalnum() for host in read(entry))


lines = st.text(st.sampled_from("aZ09.-_:= #\t\r\n\0\x1b\u0661\u202e"), max_size=60) | st.text(max_size=30)
parts = st.sampled_from(
    ["server1", "slots", "=", "4", " ", "\n", ":", "max-slots=8", "#", "-V", "0", "99999", "\u0664"]
)


@given(content=(lines | st.lists(parts, max_size=12).map("".join)).map(str.encode) | st.binary(max_size=60))
def test_any_host_file_is_read_or_refused_in_one_line(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(content)
    try:
        read = hosts.read_hostfile(path)
        hosts.check(read)
    except UserError as error:
        assert re.match("expected .+, received .+; .+", str(error)) and str(error).isprintable()
        assert str(error).isascii() and len(str(error)) < 600
    else:
        assert all(1 <= host.slots <= 8192 for host in read)


def test_names_are_looked_up():
    with pytest.raises(UserError, match="received no-such-host.invalid; correct it"):
        hosts.check_names([Host("localhost", 1), Host("no-such-host.invalid", 1)])
    with pytest.raises(UserError, match="received localhost and 127.0.0.1 for the one at 127.0.0.1"):
        hosts.check_names([Host("localhost", 1), Host("127.0.0.1", 1)])
    hosts.check_names([Host("localhost", 1)])


def test_topology():
    unequal = [Host("a", 3), Host("long-name", 1), Host("c", 2)]
    assert hosts.topology(unequal).splitlines() == [
        "3 hosts, 6 ranks",
        "  a          slots=3  ranks 0-2",
        "  long-name  slots=1  rank 3",
        "  c          slots=2  ranks 4-5",
    ]


def test_launch_lines():
    """Bash parses the lines as intended; tests/cluster runs them."""
    lines = hosts.launch_lines(TWO)
    assert lines["horovodrun, MPI"] == "horovodrun -np 8 -H server1:4,server2:4 python pytorch/train.py"
    assert lines["srun"].startswith("srun --nodelist 'server[1-2]' --ntasks-per-node 4 --ntasks 8 ")
    assert len([launcher for launcher in lines if launcher.startswith("torchrun")]) == 2
    assert "srun" not in hosts.launch_lines([Host("a", 3), Host("b", 1)])
    for line in lines.values():
        printed = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True).stdout
        assert printed.splitlines() == shlex.split(line)


def test_the_command():
    quote = run("allstep", "hosts", "hostfiles/two-servers", "--no-resolve")
    assert quote.returncode == 0 and "ranks 4-7" in quote.stdout and "horovodrun --gloo -np 8" in quote.stdout
    converted = run("allstep", "hosts", "-H", "localhost:2", "--to", "hostfile")
    assert (converted.returncode, converted.stdout) == (0, "localhost slots=2\n")
    mistakes = [
        ("-H", "a:1,$(reboot):1"),
        ("-H", ""),
        ("-H", "a:1", "hostfiles/localhost"),
        ("--to", "yaml"),
        ("hostfiles/two-servers", "--no-resolved"),
    ]
    for arguments in mistakes:
        result = run("allstep", "hosts", *arguments)
        assert (result.returncode, result.stdout) == (2, ""), result.output
        [line] = result.stderr.splitlines()
        assert line.startswith("allstep: error: ")


def test_an_empty_host_file_is_not_taken_for_none(tmp_path):
    (tmp_path / "hosts").touch()
    with pytest.raises(UserError, match="expected at least one host, received none"):
        given_hosts(tmp_path / "hosts", None, name="--hosts")
