"""Placements of ranks. Oracle: each launcher's variables, as documented and, if it is installed, as it sets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import LAUNCHERS, launch, run

from allstep.common.base.errors import UserError
from allstep.common.launch.placement import (
    ALONE,
    Placement,
    apparent_rank,
    find_placement,
    threads_per_rank,
)
from allstep.common.launch.placement import BY_HAND as STARTED_BY_HAND
from allstep.common.launch.variables import expand_nodelist, tasks_per_node

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_HOSTNAME": "server2",
}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "server2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "server1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "29500",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "server1",
    "MASTER_PORT": "29500",
}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "server1", "MASTER_PORT": "29500"}
JSRUN = {
    f"JSM_NAMESPACE_{name}": text
    for name, text in (("RANK", "5"), ("SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4"))
}
# Environment of a job's script (qsub of Open PBS 23, bsub of Spectrum LSF 10.1).
PBS = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "7.head",
    "PBS_NODEFILE": "/var/spool/pbs/aux/7.head",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "NCPUS": "4",
    "OMP_NUM_THREADS": "4",
}
LSF = {
    "LSB_JOBID": "7",
    "LSB_HOSTS": "server1 server1 server2 server2",
    "LSB_MCPU_HOSTS": "server1 2 server2 2",
    "LSB_DJOB_NUMPROC": "4",
    "LSF_ENVDIR": "/etc/lsf",
}
MVAPICH = {name.replace("JSM_NAMESPACE", "MV2_COMM_WORLD"): text for name, text in JSRUN.items()}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        (OPEN_MPI, Placement("mpirun", 5, 8, 1, 4, 1, ("server2",))),
        (HOROVOD, Placement("horovodrun", 5, 8, 1, 4, 1, ("server2",))),
        (TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, ALONE.hosts)),
        (HYDRA, Placement("mpiexec", 3, 4, 1, 2, 1, ALONE.hosts)),
        (JSRUN, Placement("jsrun", 5, 8, 1, 4, 1, ALONE.hosts)),
        (MVAPICH, Placement("mpirun_rsh", 5, 8, 1, 4, 1, ALONE.hosts)),
        (SLURM, Placement("srun", 5, 7, 1, 3, 1, ("gpu01", "gpu02"))),
        # Slurm's PMI-2 also sets a rank and a size.
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, Placement("srun", 5, 7, 1, 3, 1, ("gpu01", "gpu02"))),
        # Without a launcher, ranks find out by themselves which of them share a host (`by_hand.locate`).
        (BY_HAND, Placement("env://", 3, 4, 0, 1, None, ALONE.hosts)),
        ({**BY_HAND, "LOCAL_RANK": "1"}, Placement("env://", 3, 4, 1, 1, None, ALONE.hosts)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}, ALONE),
        ({"RANK": "", "WORLD_SIZE": ""}, ALONE),
        # Scripts for srun set these; and variables for one process may be present in any job.
        ({**SLURM, **BY_HAND, "RANK": "5", "WORLD_SIZE": "7"}, Placement("srun", 5, 7, 1, 3, 1, ("gpu01", "gpu02"))),
        ({**HOROVOD, "RANK": "0", "WORLD_SIZE": "1"}, Placement("horovodrun", 5, 8, 1, 4, 1, ("server2",))),
        # The innermost launcher counts: torchrun in an MPI job, mpirun in a Slurm step.
        ({**OPEN_MPI, **TORCHRUN}, Placement("torchrun", 3, 4, 1, 2, 1, ALONE.hosts)),
        ({**SLURM, **OPEN_MPI}, Placement("mpirun", 5, 8, 1, 4, 1, ("server2",))),
        # The same holds in jobs of PBS and LSF, whose own variables do not describe ranks.
        ({**PBS, **OPEN_MPI}, Placement("mpirun", 5, 8, 1, 4, 1, ("server2",))),
        ({**PBS, **HYDRA}, Placement("mpiexec", 3, 4, 1, 2, 1, ALONE.hosts)),
        ({**LSF, **OPEN_MPI}, Placement("mpirun", 5, 8, 1, 4, 1, ("server2",))),
        ({**LSF, **JSRUN}, Placement("jsrun", 5, 8, 1, 4, 1, ALONE.hosts)),
        (PBS, ALONE),
        (LSF, ALONE),
        # Ray Train gives a worker the variables of torch's env://, and its host's number.
        (
            {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"},
            Placement("env://", 3, 4, 1, 2, None, ALONE.hosts),
        ),
        # A batch script sees the allocation's numbers, but no launcher started it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, ALONE),
        # The same holds for the shell of salloc, though it is a step.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, ALONE),
        # Unequal hosts: Open MPI does not say which host this is, and nothing is guessed.
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "7", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            Placement("mpirun", 5, 7, 1, 3, None, ("server2",)),
        ),
    ],
)
def test_placement(environ, expected):
    assert find_placement(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "8"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"},
        {**TORCHRUN, "RANK": "three"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x"},
        {**SLURM, "SLURM_STEP_NODELIST": "gpu[a-b]"},
    ],
)
def test_contradictions_are_refused(environ):
    with pytest.raises(UserError, match="expected"):
        find_placement(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
    ],
)
def test_nodelist(text, hosts):
    assert expand_nodelist(text) == hosts


notation = st.text(st.sampled_from("a01279-[],()x \u0661\n"), max_size=40) | st.text(max_size=20)
numbers = st.integers(-1, 9).map(str) | st.sampled_from(["", "a", "9" * 5000, "\u0661", " 1", "1e3"])
VARIABLES = sorted({*SLURM, *OPEN_MPI, *HOROVOD, *TORCHRUN, *HYDRA, *JSRUN, *MVAPICH, "SLURM_NTASKS", "PMI_LOCAL_RANK"})


def or_one_line(read: Callable[[], object]) -> object:
    """Return the result of `read`, or None if it raises an error of one printable line."""
    try:
        return read()
    except UserError as error:
        assert re.match("expected .+, received .+; .+", str(error)) and str(error).isprintable()
        assert str(error).isascii() and len(str(error)) < 600
        return None


@given(text=notation)
def test_any_text_is_a_list_or_refused_in_one_line(text):
    hosts, tasks = or_one_line(lambda: expand_nodelist(text)), or_one_line(lambda: tasks_per_node(text))
    assert hosts is None or 1 <= len(hosts) <= 2**16
    assert tasks is None or all(count >= 0 for count in tasks)


@given(spans=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=4))
def test_lists_of_any_size_take_little(spans):
    """Lists are either short or refused before they are expanded."""
    ranges = ",".join(f"{first}-{last}" for first, last in spans)
    sizes = [last - first + 1 for first, last in spans]
    hosts = or_one_line(lambda: expand_nodelist(f"n[{ranges}]"))
    assert (hosts is None) == (min(sizes) < 1 or sum(sizes) > 2**16)


@given(
    environ=st.dictionaries(st.sampled_from(VARIABLES), numbers, max_size=12)
    | st.sampled_from([SLURM, OPEN_MPI, HOROVOD, TORCHRUN, HYDRA, JSRUN, MVAPICH, BY_HAND]).flatmap(
        lambda whole: st.dictionaries(st.sampled_from(sorted(whole)), numbers, max_size=2).map(
            lambda some: whole | some
        )
    )
)
def test_any_environment_is_a_place_or_refused_in_one_line(environ):
    placement = or_one_line(lambda: find_placement(environ))
    if placement is not None:
        assert 0 <= placement.rank < placement.world_size and 1 <= placement.local_size <= placement.world_size
        assert (
            0
            <= placement.local_rank
            < (placement.world_size if placement.launcher == STARTED_BY_HAND else placement.local_size)
        )
        assert placement.cross_rank is None or 0 <= placement.cross_rank < placement.world_size


def test_who_speaks_first_about_a_wrong_environment():
    assert apparent_rank({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0", "RANK": "0"}) == 5
    assert apparent_rank({**BY_HAND, "MASTER_PORT": "abc"}) == 3
    assert apparent_rank({**HOROVOD, "HOROVOD_RANK": "9" * 5000}) == 0


def test_tasks_per_node():
    assert tasks_per_node("4(x2),3") == [4, 4, 3]


def test_threads():
    two = find_placement({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1000", "OMPI_COMM_WORLD_SIZE": "1000"})
    assert threads_per_rank(two, {}) == 1
    assert threads_per_rank(two, {"OMP_NUM_THREADS": "3"}) == 3


PRINT_PLACEMENT = """
import dataclasses, json
from allstep.common.launch.placement import find_placement
print("PLACE" + json.dumps(dataclasses.asdict(find_placement())) + "END", flush=True)
"""


def _places(output: str) -> list[dict]:
    parts = [json.loads(part.split("END")[0]) for part in output.split("PLACE")[1:]]
    return sorted(parts, key=lambda placement: placement["rank"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_real_launchers(launcher, tmp_path):
    script = tmp_path / "place.py"
    script.write_text(PRINT_PLACEMENT)
    places = _places(launch(launcher, 2, script).stdout)
    assert [
        (placement["rank"], placement["local_rank"], placement["world_size"], placement["local_size"])
        for placement in places
    ] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert [placement["cross_rank"] for placement in places] == [0, 0]


def test_real_torchrun(tmp_path):
    script = tmp_path / "place.py"
    script.write_text(PRINT_PLACEMENT)
    result = run("torchrun", "--standalone", "--nproc-per-node", 2, script)
    assert [
        (placement["launcher"], placement["rank"], placement["world_size"]) for placement in _places(result.stdout)
    ] == [
        ("torchrun", 0, 2),
        ("torchrun", 1, 2),
    ]
