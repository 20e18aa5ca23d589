"""The doctor's checks, each a function of observations. Oracle: the made-up faults in the tables below."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from allstep.commands.doctor import all_reduce, examination, facts, gpus, launchers, machine, network, software
from allstep.commands.doctor.all_reduce import Measurement
from allstep.commands.doctor.conversation import Clock, why_gone
from allstep.commands.doctor.facts import Facts
from allstep.commands.doctor.finding import Finding
from allstep.commands.doctor.gpus import Gpus
from allstep.commands.doctor.launchers import Launchers
from allstep.commands.doctor.machine import Folder, Machine
from allstep.commands.doctor.network import Interface
from allstep.commands.doctor.software import DataSet, Frameworks, Installation, Software
from allstep.common.files.strict_json import from_json, to_json
from allstep.common.launch.versions import HorovodBuild

LAUNCHERS = Launchers("/env", "mpirun (Open MPI) 4.1.8", True, "/env/bin/orted", True, "/env/bin/mpirun", ssh=True)
LIBRARIES = {"NCCL": ("/a/libnccl.so.2",), "cuDNN": ("/a/libcudnn.so.9",), "cuBLAS": ("/a/libcublas.so.13",)}
TORCH = Installation("2.14.1+cu130", "13.0", 2, (), LIBRARIES, None)
FRAMEWORKS = Frameworks(
    {"pytorch": TORCH, "tensorflow": Installation("2.21.0", "12.5.1", 2, (), {}, None)},
    {},
    HorovodBuild({"pytorch": "2.14.1+cu130", "tensorflow": "2.21.0"}, ("MPI", "Gloo", "NCCL")),
)
GPUS = Gpus(2, ("NVIDIA H100 80GB HBM3",) * 2, "580.82.07", "13.0", {"0-1": "NV18"})
MACHINE = Machine(
    num_cores=8,
    cpu_quota=None,
    num_threads=None,
    memory=32_000_000_000,
    shm_free=16_000_000_000,
    open_files=20_000,
    processes=None,
    locked_bytes=None,
    infiniband=False,
    huge_pages="madvise",
    governors=("performance",),
)
FOLDER = Folder("/tmp", 10**11, 10**6, writable=True)
SERVER1 = Interface("eth0", "10.0.0.1", "10.0.0.0/24", 10_000, 1500)
SERVER2 = replace(SERVER1, address="10.0.0.2")
MNIST = DataSet(4, 11_594_722, "0123456789abcdef")
SOFTWARE = Software("3.11.7", {"torch": "2.14.1"}, "c" * 40, {"pytorch/train.py": "0"}, {"mnist": MNIST})
MEASURED = Measurement(2, 2**26, 0.1, 5e9, right=True)


def frameworks_with(**changes: object) -> Frameworks:
    return replace(FRAMEWORKS, **changes)


def pytorch_with(**changes: object) -> Frameworks:
    return replace(FRAMEWORKS, installed={**FRAMEWORKS.installed, "pytorch": replace(TORCH, **changes)})


def all_of(*findings: Finding | list[Finding]) -> list[Finding]:
    return [one for found in findings for one in (found if isinstance(found, list) else [found])]


HEALTHY = all_of(
    launchers.check(LAUNCHERS),
    launchers.check_path(LAUNCHERS),
    software.check_frameworks(FRAMEWORKS),
    gpus.check(GPUS, FRAMEWORKS),
    gpus.check(replace(GPUS, devices=0, names=(), driver=None, links={}), None),
    machine.check(MACHINE, 2, 2),
    machine.check(replace(MACHINE, num_threads="1", cpu_quota=8.0), 8, 0),
    machine.check_folders((FOLDER,)),
    network.check({"server1": (SERVER1,), "server2": (SERVER2,)}),
    examination.check_software(SOFTWARE, SOFTWARE, "server1"),
    examination.check_data({"server1": SOFTWARE, "server2": SOFTWARE}),
    examination.check_clock(Clock(-0.01, 0.001), "server1"),
    examination.check_clock(Clock(6.0, 5.9), "server1"),  # within the uncertainty
    examination.check_ports({"server1": {}, "server2": {}}, 2),
    all_reduce.check_host(MEASURED),
    all_reduce.check_across(MEASURED, 10_000),
    all_reduce.check_across(MEASURED, 0),
)


def test_what_is_well_needs_no_fix():
    assert {one.level for one in HEALTHY} == {"ok"}, [one for one in HEALTHY if one.level != "ok"]
    assert not any(one.fix for one in HEALTHY)


@pytest.mark.parametrize(
    ("findings", "level", "subject", "found"),
    [
        (launchers.check(replace(LAUNCHERS, ssh=False)), "fault", "launchers", "no ssh"),
        (launchers.check(replace(LAUNCHERS, mpirun=None)), "fault", "launchers", "no MPI in /env"),
        (
            launchers.check(replace(LAUNCHERS, horovodrun=False)),
            "warning",
            "launchers",
            "torchrun starts ranks",
        ),
        (launchers.check(replace(LAUNCHERS, daemon=None)), "warning", "mpi daemon", "on the PATH of other hosts"),
        (
            launchers.check(replace(LAUNCHERS, daemon_exists=False)),
            "fault",
            "mpi daemon",
            "/env/bin/orted, which is not",
        ),
        (
            launchers.check_path(replace(LAUNCHERS, first_on_path="/usr/bin/mpirun")),
            "warning",
            "PATH",
            "/usr/bin/mpirun",
        ),
        (launchers.check_path(replace(LAUNCHERS, first_on_path=None)), "warning", "PATH", "no mpirun"),
        (software.check_frameworks(frameworks_with(horovod=None)), "warning", "horovod", "not installed"),
        (
            software.check_frameworks(pytorch_with(version="2.13.0")),
            "fault",
            "pytorch",
            "PyTorch 2.13.0, but Horovod was built for 2.14.1+cu130",
        ),
        (
            software.check_frameworks(
                frameworks_with(horovod=HorovodBuild({"pytorch": "2.14.1+cu130"}, ("MPI", "NCCL")))
            ),
            "fault",
            "tensorflow",
            "Horovod was built without it",
        ),
        (
            software.check_frameworks(frameworks_with(horovod=replace(FRAMEWORKS.horovod, features=("MPI", "Gloo")))),
            "warning",
            "horovod",
            "without NCCL for the GPUs",
        ),
        (
            software.check_frameworks(pytorch_with(horovod_error="ImportError: undefined symbol")),
            "fault",
            "pytorch",
            "undefined symbol",
        ),
        (
            software.check_frameworks(
                replace(FRAMEWORKS, installed={}, errors=dict.fromkeys(FRAMEWORKS.installed, "no libc10"))
            ),
            "fault",
            "pytorch",
            "cannot be imported: no libc10",
        ),
        (gpus.check(replace(GPUS, driver=None), None), "fault", "gpus", "2 on the PCI bus, without a driver"),
        (gpus.check(replace(GPUS, names=("A100", "H100")), None), "warning", "gpus", "unlike ones"),
        (gpus.check(replace(GPUS, links={"0-1": "SYS"}), None), "warning", "gpu links", "GPUs 0-1 reach each other"),
        (gpus.check(replace(GPUS, driver="570.1"), FRAMEWORKS), "fault", "driver", "needs driver 580"),
        (gpus.check(GPUS, pytorch_with(cuda=None)), "warning", "pytorch", "built for CPUs"),
        (gpus.check(GPUS, pytorch_with(num_gpus=1)), "warning", "pytorch", "sees 1 of 2 GPUs"),
        (gpus.check(GPUS, pytorch_with(no_peer_access=((0, 1),))), "warning", "gpu peers", "GPUs 0-1"),
        (
            gpus.check(GPUS, pytorch_with(libraries={"NCCL": ("/a/libnccl.so.2", "/b/libnccl.so.2")})),
            "fault",
            "pytorch libraries",
            "loads NCCL twice: /a/libnccl.so.2 and /b/libnccl.so.2",
        ),
        (machine.check(MACHINE, 4, 2), "warning", "cores", "4 ranks for 2 GPUs"),
        (machine.check(MACHINE, 9, 0), "warning", "cores", "8 cores for 9 ranks"),
        (machine.check(replace(MACHINE, cpu_quota=1.5), 2, 0), "warning", "cores", "1.5 cores for 2 ranks"),
        (machine.check(replace(MACHINE, cpu_quota=0.5), 1, 0), "warning", "cores", "0.5 cores for 1 rank"),
        (machine.check(replace(MACHINE, unknown_name="x"), 2, 0), "warning", "host name", "x cannot be resolved"),
        (machine.check(replace(MACHINE, num_threads="8"), 2, 0), "warning", "cores", "8 threads each"),
        (machine.check(replace(MACHINE, memory=10**9), 2, 0), "fault", "memory", "1 GB left for 2 ranks"),
        (machine.check(replace(MACHINE, shm_free=2**26), 2, 0), "warning", "shared memory", "67.1 MB free"),
        (machine.check(replace(MACHINE, open_files=256), 2, 0), "warning", "open files", "at most 256"),
        (machine.check(replace(MACHINE, processes=100), 2, 0), "warning", "processes", "at most 100"),
        (
            machine.check(replace(MACHINE, infiniband=True, locked_bytes=65536), 2, 0),
            "fault",
            "locked memory",
            "at most 65.5 kB",
        ),
        (machine.check(replace(MACHINE, governors=("powersave",)), 2, 0), "warning", "governor", "powersave"),
        (machine.check(replace(MACHINE, huge_pages="never"), 2, 0), "warning", "huge pages", "never"),
        (machine.check_folders((replace(FOLDER, free_bytes=0),)), "fault", "disk", "0 B free in /tmp: it is full"),
        (machine.check_folders((replace(FOLDER, free_bytes=10**9),)), "warning", "disk", "1 GB free in /tmp"),
        (machine.check_folders((replace(FOLDER, free_files=0),)), "fault", "disk", "no file more fits in /tmp"),
        (machine.check_folders((replace(FOLDER, writable=False),)), "fault", "disk", "/tmp cannot be written"),
        (network.check({"server1": (SERVER1,), "server2": ()}), "fault", "network", "server2 has no interface"),
        (
            network.check({"server1": (SERVER1,), "server2": (replace(SERVER2, network="10.1.0.0/24"),)}),
            "warning",
            "network",
            "no network is common",
        ),
        (
            network.check({"server1": (SERVER1,), "server2": (replace(SERVER2, megabits=100),)}),
            "warning",
            "network speed",
            "server1 10 Gbit/s, server2 100 Mbit/s",
        ),
        (
            network.check({"server1": (SERVER1,), "server2": (replace(SERVER2, mtu=9000),)}),
            "fault",
            "network mtu",
            "server1 1500, server2 9000",
        ),
        (
            examination.check_software(replace(SOFTWARE, python="3.12.1"), SOFTWARE, "server1"),
            "fault",
            "python",
            "Python 3.12.1, and 3.11.7 on server1",
        ),
        (
            examination.check_software(replace(SOFTWARE, packages={"torch": "2.13.0"}), SOFTWARE, "server1"),
            "fault",
            "packages",
            "torch 2.13.0, and 2.14.1 on server1",
        ),
        (
            examination.check_software(replace(SOFTWARE, sources={}, commit="d" * 40), SOFTWARE, "server1"),
            "fault",
            "checkout",
            "pytorch/train.py unlike that of server1 (commit dddddddddd)",
        ),
        (
            examination.check_data(
                {
                    "server1": SOFTWARE,
                    "server2": replace(SOFTWARE, data_sets={"mnist": replace(MNIST, digest="f" * 16)}),
                }
            ),
            "fault",
            "data",
            "mnist of server2 is not that of server1",
        ),
        (
            examination.check_data({"server1": SOFTWARE, "server2": replace(SOFTWARE, data_sets={})}),
            "warning",
            "data",
            "mnist is not on server2",
        ),
        (examination.check_clock(Clock(90, 0.1), "server1"), "fault", "clock", "90 s ahead of server1"),
        (examination.check_clock(Clock(-1, 0.1), "server1"), "warning", "clock", "1 s behind server1"),
        (
            examination.check_ports({"server1": {"server2": "timed out"}, "server2": {}}, 2),
            "fault",
            "ports",
            "server1 does not reach server2: timed out",
        ),
        (all_reduce.check_host("no route"), "fault", "all-reduce", "fails on this host: no route"),
        (all_reduce.check_host(replace(MEASURED, right=False)), "fault", "all-reduce", "a wrong sum on this host"),
        # 2 (n-1)/n S/t = 671 MB/s of 12.5 GB/s.
        (all_reduce.check_across(MEASURED, 100_000), "warning", "all-reduce", "671 MB/s of bus bandwidth"),
        (why_gone("server2", 255, "Permission denied (publickey)."), "fault", "ssh", "asks for a password"),
        (why_gone("server2", 255, "Host key verification failed."), "fault", "ssh", "host's key is right"),
        (why_gone("server2", 255, "ssh: Could not resolve hostname x"), "fault", "ssh", "its name is not known"),
        (why_gone("server2", 255, "connect: Connection refused"), "fault", "ssh", "nothing listens"),
        (why_gone("server2", 255, "connect: Connection timed out"), "fault", "ssh", "does not answer"),
        (why_gone("server2", 255, "kex\x1b[2J"), "fault", "ssh", r"fails: 'kex\x1b[2J'"),
        (why_gone("server2", 1, "bash: cd: /x: No such file"), "fault", "checkout", "no allstep at the path"),
        (why_gone("server2", 1, "python: No module named allstep"), "fault", "checkout", "no allstep at the path"),
        (why_gone("server2", 1, "Traceback (most\nOSError: disk"), "fault", "ssh", "the doctor there failed: 'OSError"),
        (why_gone("server2", -9, ""), "fault", "ssh", "gave no answer within"),
    ],
)
def test_what_is_wrong_has_a_line_and_a_fix(findings, level, subject, found):
    lines = [one for one in all_of(findings) if (one.level, one.subject) == (level, subject)]
    assert [one for one in lines if found in one.found and one.fix], all_of(findings)


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.launch
@pytest.mark.parametrize(("variable", "command"), [("CXX", "no-such-compiler"), ("CXX", "true"), ("PATH", "/nowhere")])
def test_tools_that_cannot_build_horovod_are_a_warning(monkeypatch, variable, command):
    assert facts.check_toolchain().level == "ok"
    monkeypatch.setenv(variable, command)
    found = facts.check_toolchain()
    assert (found.level, found.subject) == ("warning", "compiler")
    assert "expected a C++20 compiler, received" in found.found and "apt-get install g++ make" in found.fix


def test_links_of_gpus():
    """The input is the output of nvidia-smi topo -m."""
    assert gpus.links(TOPOLOGY) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}


def test_facts_pass_from_host_to_host():
    """Limits may be missing: most hosts have no limit of processes."""
    facts = Facts(
        Finding("ok", "compiler", "g++ 12.2.0"),
        LAUNCHERS,
        GPUS,
        MACHINE,
        (FOLDER, replace(FOLDER, free_files=None)),
        (SERVER1,),
        SOFTWARE,
        FRAMEWORKS,
    )
    assert from_json(Facts, json.loads(json.dumps(to_json(facts))), "facts") == facts
