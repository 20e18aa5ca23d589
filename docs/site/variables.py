"""Page of the environment variables that allstep reads: settings of the user, what launchers set, what is checked."""

import dataclasses
from collections.abc import Iterable

from allstep.common.launch import placement, variables

SETTINGS = {
    "ALLSTEP_HOROVOD_WHEELS": "folder or URL of Horovod wheels, with SHA256SUMS, that `allstep horovod install` takes",
    "CUDA_VISIBLE_DEVICES": "GPUs that a process may use; CUDA reads it, and `allstep compare` divides those it names",
    "CXX": "C++ compiler for `--compile` in PyTorch and for building Horovod, in place of `g++` or `c++`",
    "GLOO_SOCKET_IFNAME": "network interfaces of Gloo, which must exist; jobs on one host use the loopback interface",
    "HOME": "holds the cache where XDG_CACHE_HOME is not set",
    "HOROVOD_TIMELINE": "file for Horovod's timeline, as `--timeline` sets it",
    "LOGNAME, USER, LNAME, USERNAME": "name of the user; where there is none, LOGNAME is set for the libraries",
    "LSB_MCPU_HOSTS, PBS_NODEFILE, SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE": "hosts of the allocation, for "
    "`allstep hosts`",
    "MASTER_ADDR, MASTER_PORT": "address of rank 0, for ranks that are started by RANK and WORLD_SIZE",
    "OMP_NUM_THREADS": "threads of each rank; without it the cores of a host are divided among its ranks",
    "PATH": "where launchers and compilers are found",
    "PYTHONPATH": "is kept for the processes that commands start",
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE": "placement of a rank that no launcher has started",
    "TF_CONFIG": "cluster of `multi-worker-mirrored` and `parameter-server`, in place of a launcher",
    "TF_USE_LEGACY_KERAS": "is refused where it is true, since it puts Keras 2 in the place of Keras 3",
    "XDG_CACHE_HOME": "folder of data sets and of built wheels of Horovod, in place of ~/.cache",
}
"""Variables that a user may set, and what for."""
SIGNS = {
    "AWS_BATCH_JOB_NUM_NODES, AZUREML_NODE_COUNT, SKYPILOT_NUM_NODES": ""
    "nodes on which a scheduler starts the same command; above 1, a run without a launcher is refused",
    "HOROVOD_ELASTIC": "horovodrun's elastic jobs",
    "HOROVOD_JOB_KEY": "key with which ranks under horovodrun sign their requests",
    "KUBERNETES_SERVICE_HOST": "a pod, whose own address may be a loopback one for the others",
    "OMPI_COMM_WORLD_RANK, OMPI_MCA_btl, OMPI_MCA_orte_bound_at_launch": "ranks of Open MPI: transports, binding",
    "OPAL_PREFIX": "folder of Open MPI; set where it is a wheel of the environment",
    "PMI_ID, PMIX_RANK, PALS_RANKID, ALPS_APP_PE, FLUX_TASK_RANK, PET_NNODES, PET_NPROC_PER_NODE, SM_HOSTS": ""
    "processes that an unsupported launcher has started, so that they are refused instead of training alone",
    "SLURM_GPUS_PER_TASK, SLURM_GPU_BIND, SLURM_NTASKS_PER_GPU, SLURM_TRES_BIND, SLURM_TRES_PER_TASK": ""
    "GPUs that Slurm has assigned to each rank",
    "SLURM_JOB_ID": "the job, in the name of its rendezvous",
    "SLURM_JOB_NUM_NODES, SLURM_NTASKS_PER_NODE": "tasks that srun would start in this allocation",
    "TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_USE_AGENT_STORE": "torchrun's restarts, for `--elastic`",
    "ALLSTEP_JOB, ALLSTEP_LISTENER, ALLSTEP_PROVE": "set by commands for the processes that they start",
}
"""Variables that launchers and schedulers set, other than ranks and sizes."""


def page() -> str:
    """Return the page."""
    lines = [
        "# Environment variables",
        "",
        "This reference lists the variables that allstep reads, written from the code when the site is built.",
        "Libraries read others: NCCL, PyTorch, TensorFlow and MPI document theirs.",
        "",
        "## Settings",
        "",
        *table(("variable", "meaning"), SETTINGS.items()),
        "",
        "## Placement",
        "",
        "Where the ranks are is read from the innermost launcher that has set its variables, in this order:",
        "",
        *table(("launcher", "variables"), ((one.launcher, names(one)) for one in placement._LAUNCHERS)),
        "",
        "## Signs of launchers and schedulers",
        "",
        *table(("variable", "read for"), SIGNS.items()),
        "",
        "## Checked for Horovod and Gloo",
        "",
        "Horovod reads these as `strtol` does, which takes a wrong value for 0; a wrong one is refused.",
        "",
        *table(("variable", "values"), checked()),
    ]
    return "\n".join(lines) + "\n"


def names(launcher: placement._Variables) -> str:
    """Return all variables that are read under a launcher, without duplicates."""
    found: list[str] = []
    for field in dataclasses.fields(launcher)[1:]:
        value = getattr(launcher, field.name)
        found += [value] if isinstance(value, str) else value or ()
    return ", ".join(f"`{name}`" for name in dict.fromkeys(found))


def checked() -> list[tuple[str, str]]:
    """Return the variables that `check_variables` checks, and what each may be."""
    rows = [(name, f"whole number from {low} to {high}") for name, (low, high) in variables._HOROVOD_NUMBERS.items()]
    rows += [(name, f"number from 0 to {high}") for name, high in variables._HOROVOD_FRACTIONS.items()]
    rows += [(name, ", ".join(words)) for name, words in variables._HOROVOD_WORDS.items()]
    return sorted(rows + [(name, "network interfaces of this host") for name in variables._INTERFACES])


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a table; the first column has names."""
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    return lines + [f"| {', '.join(f'`{name}`' for name in one.split(', '))} | {text} |" for one, text in rows]
