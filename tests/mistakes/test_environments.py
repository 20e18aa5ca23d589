"""Wrong environments of launchers, and environments of other ranks. Oracle: the contract in `mistake.check`."""

from __future__ import annotations

import json

import pytest
from mistake import PYTORCH, TENSORFLOW, Mistake, check

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BY_HAND = {**MASTER, "RANK": "0", "WORLD_SIZE": "2"}
TORCHRUN = {
    **BY_HAND,
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}
RESTARTING = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
HOROVOD = {
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "0",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
}
CLUSTER = {"cluster": {"worker": ["localhost:5001", "localhost:5002"]}, "task": {"type": "worker", "index": 0}}
TF_CONFIG = {"TF_CONFIG": json.dumps(CLUSTER)}
DDP, SINGLE = f"{PYTORCH} --strategy ddp", f"{PYTORCH} --strategy single"
ELASTIC = f"{DDP} --elastic"
MULTI_WORKER = f"{TENSORFLOW} --strategy multi-worker-mirrored"


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


def wrong(environ: dict[str, str], name: str, value: str, expected: str, *, command: str = DDP) -> Mistake:
    """Return a mistake in one variable of a launcher."""
    quote = value if len(value) < 60 else value[:60]
    return Mistake(command, f"{name} to be {expected}", quote, {**environ, name: value})


MISTAKES = {
    # Numbers of every launcher.
    "HOROVOD_RANK of 5,000 digits": wrong(HOROVOD, "HOROVOD_RANK", "1" * 5000, "a whole number from 0 to 1"),
    "HOROVOD_RANK negative": wrong(HOROVOD, "HOROVOD_RANK", "-1", "a whole number from 0 to 1"),
    "HOROVOD_RANK empty": wrong(HOROVOD, "HOROVOD_RANK", "", "a whole number from 0 to 1"),
    "HOROVOD_RANK in Arabic": Mistake(
        DDP, "HOROVOD_RANK to be a whole number", "'\\u0661'", {**HOROVOD, "HOROVOD_RANK": "\u0661"}
    ),
    "HOROVOD_SIZE 0": wrong(HOROVOD, "HOROVOD_SIZE", "0", "a whole number from 1 to 1048576"),
    "HOROVOD_SIZE beyond all machines": wrong(HOROVOD, "HOROVOD_SIZE", "9999999999", "a whole number from 1"),
    "HOROVOD_SIZE without HOROVOD_RANK": Mistake(
        DDP, "HOROVOD_RANK to be a whole number", "nothing; start the job by", without(HOROVOD, "HOROVOD_RANK")
    ),
    "HOROVOD_LOCAL_SIZE above HOROVOD_SIZE": wrong(HOROVOD, "HOROVOD_LOCAL_SIZE", "3", "a whole number from 1 to 2"),
    "HOROVOD_LOCAL_RANK beyond": wrong(HOROVOD, "HOROVOD_LOCAL_RANK", "2", "a whole number from 0 to 1"),
    "HOROVOD_CROSS_RANK beyond": wrong(HOROVOD, "HOROVOD_CROSS_RANK", "1", "0"),
    "HOROVOD_CROSS_SIZE above HOROVOD_SIZE": wrong(HOROVOD, "HOROVOD_CROSS_SIZE", "3", "a whole number from 1 to 2"),
    "HOROVOD_HOSTNAME unclosed": Mistake(
        DDP, "a list of hosts", "'gpu[1-'", {**HOROVOD, "HOROVOD_HOSTNAME": "gpu[1-"}
    ),
    "HOROVOD_GLOO_RENDEZVOUS_PORT a word": wrong(
        HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT", "abc", "a whole number from 1 to 65535", command=PYTORCH
    ),
    "HOROVOD_GLOO_RENDEZVOUS_PORT 65536": wrong(
        HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT", "65536", "a whole number from 1 to 65535", command=TENSORFLOW
    ),
    "HOROVOD_GLOO_RENDEZVOUS_ADDR missing": Mistake(
        PYTORCH, "HOROVOD_GLOO_RENDEZVOUS_ADDR to be", "nothing", without(HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    ),
    "OMPI local size 0": wrong(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "0", "a whole number from 1 to 2"),
    "OMPI rank beyond": wrong(OPEN_MPI, "OMPI_COMM_WORLD_RANK", "7", "a whole number from 0 to 1"),
    "OMPI local rank negative": wrong(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "-1", "a whole number from 0 to 1"),
    "OMPI size without rank": Mistake(
        PYTORCH, "OMPI_COMM_WORLD_RANK to be", "nothing", without(OPEN_MPI, "OMPI_COMM_WORLD_RANK")
    ),
    "PMI local size 0": wrong(PMI, "PMI_LOCAL_SIZE", "0", "a whole number from 1 to 2"),
    "PMI size 0": wrong(PMI, "PMI_SIZE", "0", "a whole number from 1"),
    "MPICH's local ranks missing": Mistake(
        DDP, "MPI_LOCALNRANKS to be", "nothing", without(HYDRA, "MPI_LOCALNRANKS")
    ),
    "MPICH's local size above size": wrong(HYDRA, "MPI_LOCALNRANKS", "9", "a whole number from 1 to 2"),
    "MVAPICH's local size 0": wrong(MVAPICH, "MV2_COMM_WORLD_LOCAL_SIZE", "0", "a whole number from 1 to 2"),
    "MVAPICH's size alone": Mistake(SINGLE, "MV2_COMM_WORLD_RANK to be", "nothing", {"MV2_COMM_WORLD_SIZE": "4"}),
    "jsrun's rank a word": wrong(JSRUN, "JSM_NAMESPACE_RANK", "zero", "a whole number from 0 to 1"),
    "jsrun's ranks with single": Mistake(SINGLE, "one process for --strategy single", "2 from jsrun", JSRUN),
    # Slurm.
    "SLURM_NODEID 5 of 1": wrong(SLURM, "SLURM_NODEID", "5", "0"),
    "SLURM_LOCALID beyond": wrong(SLURM, "SLURM_LOCALID", "2", "a whole number from 0 to 1"),
    "SLURM tasks for two nodes of one": Mistake(
        DDP, "the name and the tasks of each of 1 nodes", "1 names and SLURM_STEP_TASKS_PER_NODE='1,1'",
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,1"},
    ),
    "SLURM names for two nodes of one": Mistake(
        DDP, "the name and the tasks of each of 1 nodes", "2 names", {**SLURM, "SLURM_STEP_NODELIST": "a[1-2]"}
    ),
    "SLURM tasks more than all": Mistake(
        DDP, "the name and the tasks", "='9'", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9"}
    ),
    "SLURM tasks per node unclosed": Mistake(
        DDP, "tasks per node as in 4(x2),3", "'4(x'", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x"}
    ),
    "SLURM tasks that fill the memory": Mistake(
        DDP, "tasks per node", "'9(x99999),", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": ",".join(["9(x99999)"] * 999)}
    ),
    "SLURM hosts that fill the memory": Mistake(
        DDP, "a list of hosts", "more than 65536", {**SLURM, "SLURM_STEP_NODELIST": "n[1-99999][1-99999]"}
    ),
    "SLURM hosts of long names": Mistake(
        DDP, "a list of hosts", "more than 253 characters", {**SLURM, "SLURM_STEP_NODELIST": "n" * 99999 + "[1-60000]"}
    ),
    "SLURM hosts backwards": Mistake(
        DDP, "a span of host numbers", "'9-1'", {**SLURM, "SLURM_STEP_NODELIST": "n[9-1]"}
    ),
    "srun without PMIx": Mistake(
        PYTORCH, "srun --mpi=pmix for --strategy horovod", "srun that says nothing to MPI; start it by that", SLURM
    ),
    "srun without PMIx, TensorFlow": Mistake(TENSORFLOW, "srun --mpi=pmix", "srun that says nothing to MPI", SLURM),
    "SLURM_JOB_ID a word": wrong(SLURM, "SLURM_JOB_ID", "seven", "a whole number from 0"),
    "an allocation of 4 tasks, plain python": Mistake(
        PYTORCH, "a process for each of the 4 tasks", "one that srun has not started; start them by srun",
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ),
    "an allocation of 4 tasks, plain python, TensorFlow": Mistake(
        TENSORFLOW, "a process for each of the 4 tasks", "one", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    ),
    "an allocation of 4 tasks, ddp": Mistake(
        DDP, "a process for each of the 4 tasks", "one", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    ),
    "an allocation of 2 nodes with 4 tasks each": Mistake(
        PYTORCH, "a process for each of the 8 tasks", "one", {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    ),
    "the shell of salloc": Mistake(
        PYTORCH, "a process for each of the 4 tasks", "one", {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}
    ),
    "SLURM_NTASKS a word": wrong({}, "SLURM_NTASKS", "four", "a whole number from 1", command=PYTORCH),
    "a task of Slurm without its step": Mistake(
        SINGLE, "all that srun gives its tasks", "SLURM_PROCID='1' without SLURM_STEP_ID", {"SLURM_PROCID": "1"}
    ),
    # torchrun.
    "torchrun without MASTER_ADDR": Mistake(
        DDP, "MASTER_ADDR to be the name or address", "nothing; start the job by", without(TORCHRUN, "MASTER_ADDR")
    ),
    "torchrun without MASTER_PORT": Mistake(
        DDP, "MASTER_PORT to be a whole number from 1 to 65535", "nothing", without(TORCHRUN, "MASTER_PORT")
    ),
    "torchrun's MASTER_PORT a word": wrong(TORCHRUN, "MASTER_PORT", "abc", "a whole number from 1 to 65535"),
    "torchrun's MASTER_PORT 70000": wrong(TORCHRUN, "MASTER_PORT", "70000", "a whole number from 1 to 65535"),
    "torchrun's MASTER_PORT 0": wrong(TORCHRUN, "MASTER_PORT", "0", "a whole number from 1 to 65535"),
    "torchrun's MASTER_ADDR with a space": wrong(TORCHRUN, "MASTER_ADDR", "server 1", "the name or address of a host"),
    "torchrun's LOCAL_WORLD_SIZE 0": wrong(TORCHRUN, "LOCAL_WORLD_SIZE", "0", "a whole number from 1 to 2"),
    "torchrun's GROUP_RANK beyond": wrong(TORCHRUN, "GROUP_RANK", "1", "0"),
    "torchrun's identifier alone": Mistake(
        DDP, "WORLD_SIZE to be", "nothing; start the job by torchrun again, or unset TORCHELASTIC_RUN_ID",
        {"TORCHELASTIC_RUN_ID": "none"},
    ),
    "torchrun with horovod": Mistake(PYTORCH, "horovodrun, mpirun or srun", "torchrun", TORCHRUN),
    "torchrun with multi-worker-mirrored": Mistake(MULTI_WORKER, "horovodrun, mpirun or srun", "torchrun", TORCHRUN),
    "torchrun with parameter-server": Mistake(
        f"{TENSORFLOW} --strategy parameter-server", "horovodrun, mpirun or srun", "torchrun", TORCHRUN
    ),
    "torchrun's nodes without torchrun": Mistake(
        DDP, "PET_NNODES with a launcher alone", "'2' without one; use torchrun", {"PET_NNODES": "2"}
    ),
    "torchrun's elastic nodes without torchrun": Mistake(
        PYTORCH, "PET_NNODES with a launcher", "'1:3' without one", {"PET_NNODES": "1:3", "PET_NODE_RANK": "0"}
    ),
    "a scheduler's nodes without a launcher": Mistake(
        PYTORCH, "SKYPILOT_NUM_NODES with a launcher alone", "'2' without one", {"SKYPILOT_NUM_NODES": "2"}
    ),
    "torchrun's processes without torchrun": Mistake(
        PYTORCH, "PET_NPROC_PER_NODE with a launcher", "'gpu'", {"PET_NPROC_PER_NODE": "gpu"}
    ),
    "--elastic without restarts": Mistake(
        ELASTIC, "torchrun with --max-restarts for --elastic", "torchrun without it; start it by torchrun", TORCHRUN
    ),
    "--elastic without an output directory": Mistake(
        ELASTIC, "--output-dir with --elastic under torchrun", "none; name a directory", RESTARTING
    ),
    "--elastic with the store of torchrun's agents": Mistake(
        f"{ELASTIC} --output-dir run", "a separate store for ranks that torchrun restarts",
        "its agents', where they would wait for ranks that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        {**RESTARTING, "TORCHELASTIC_USE_AGENT_STORE": "True"},
    ),
    # Without a launcher.
    "by hand without RANK": Mistake(DDP, "RANK to be a whole number from 0 to 1", "nothing", without(BY_HAND, "RANK")),
    "by hand without WORLD_SIZE": Mistake(DDP, "WORLD_SIZE to be", "nothing", {**MASTER, "RANK": "1"}),
    "by hand without MASTER_ADDR": Mistake(DDP, "MASTER_ADDR to be", "nothing", without(BY_HAND, "MASTER_ADDR")),
    "by hand without MASTER_PORT": Mistake(DDP, "MASTER_PORT to be", "nothing", without(BY_HAND, "MASTER_PORT")),
    "by hand, RANK a word": wrong(BY_HAND, "RANK", "first", "a whole number from 0 to 1"),
    "by hand, RANK 1 of 1": Mistake(SINGLE, "RANK to be 0", "'1'", {"RANK": "1", "WORLD_SIZE": "1"}),
    "by hand, WORLD_SIZE 0": wrong(BY_HAND, "WORLD_SIZE", "0", "a whole number from 1"),
    "by hand, WORLD_SIZE of 5,000 digits": wrong(BY_HAND, "WORLD_SIZE", "2" * 5000, "a whole number from 1"),
    "by hand, MASTER_ADDR with a part of 64 characters": wrong(
        BY_HAND, "MASTER_ADDR", "a" * 64, "the name or address of a host"
    ),
    "by hand, MASTER_PORT a word": wrong(BY_HAND, "MASTER_PORT", "http", "a whole number from 1 to 65535"),
    "by hand, MASTER_PORT negative": wrong(BY_HAND, "MASTER_PORT", "-1", "a whole number from 1 to 65535"),
    "by hand, LOCAL_RANK above WORLD_SIZE": wrong(BY_HAND, "LOCAL_RANK", "2", "a whole number from 0 to 1"),
    "by hand, LOCAL_RANK above LOCAL_WORLD_SIZE": wrong(
        {**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK", "1", "0"
    ),
    "by hand, LOCAL_WORLD_SIZE above WORLD_SIZE": wrong(BY_HAND, "LOCAL_WORLD_SIZE", "3", "a whole number from 1 to 2"),
    "by hand with LOCAL_RANK alone": Mistake(SINGLE, "WORLD_SIZE to be", "nothing", {"LOCAL_RANK": "1"}),
    "by hand with single": Mistake(
        SINGLE, "one process for --strategy single", "2 from RANK and WORLD_SIZE; they would train 2 times", BY_HAND
    ),
    "by hand without a strategy": Mistake(
        PYTORCH, "horovodrun, mpirun or srun for --strategy horovod", "RANK and WORLD_SIZE; start it by", BY_HAND
    ),
    "by hand with horovod, TensorFlow": Mistake(
        f"{TENSORFLOW} --strategy horovod", "horovodrun, mpirun or srun", "RANK and WORLD_SIZE", BY_HAND
    ),
    "by hand with data-parallel": Mistake(
        f"{PYTORCH} --strategy data-parallel", "one process", "2 from RANK and WORLD_SIZE", BY_HAND
    ),
    "by hand with mirrored": Mistake(f"{TENSORFLOW} --strategy mirrored", "one process", "2 from RANK", BY_HAND),
    "by hand with central-storage": Mistake(
        f"{TENSORFLOW} --strategy central-storage", "one process", "2 from RANK", BY_HAND
    ),
    "by hand with --num-gpus": Mistake(
        f"{DDP} --num-gpus 2", "--num-gpus without a launcher", "2 under RANK and WORLD_SIZE", BY_HAND
    ),
    "by hand with more stages": Mistake(
        f"{PYTORCH} --strategy model-parallel --stages 3", "as many processes as --stages, 3", "2 from RANK", BY_HAND
    ),
    "RANK against srun's": Mistake(
        DDP, "RANK and WORLD_SIZE to say rank 0 of 2 as srun does", "RANK='1' and WORLD_SIZE='2'",
        {**SLURM, **BY_HAND, "RANK": "1"},
    ),
    "WORLD_SIZE against horovodrun's": Mistake(
        PYTORCH, "RANK and WORLD_SIZE to say rank 0 of 2 as horovodrun does", "WORLD_SIZE='4'",
        {**HOROVOD, "WORLD_SIZE": "4"},
    ),
    # Variables that only show the presence of other ranks.
    "PMI without local ranks": Mistake(
        DDP, "a rank, a number of ranks and a local rank", "PMI_RANK='1' and PMI_SIZE='4'; start the job by horovodrun",
        {"PMI_RANK": "1", "PMI_SIZE": "4"},
    ),
    "PMI's size alone": Mistake(SINGLE, "a rank, a number of ranks", "PMI_SIZE='4'", {"PMI_SIZE": "4"}),
    "PMIx's rank alone": Mistake(SINGLE, "a rank, a number of ranks", "PMIX_RANK='0'", {"PMIX_RANK": "0"}),
    "Cray's rank alone": Mistake(f"{TENSORFLOW} --strategy single", "a rank", "ALPS_APP_PE='3'", {"ALPS_APP_PE": "3"}),
    "two hosts of SageMaker": Mistake(
        PYTORCH, "one host in SM_HOSTS", "algo-2", {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"}
    ),
    "hosts of SageMaker that are no list": Mistake(PYTORCH, "one host in SM_HOSTS", "'algo'", {"SM_HOSTS": "algo"}),
    # TF_CONFIG.
    "TF_CONFIG under PyTorch": Mistake(
        SINGLE, "TF_CONFIG with --strategy multi-worker-mirrored", "one of 2 processes for a job of 1", TF_CONFIG
    ),
    "TF_CONFIG with single": Mistake(
        f"{TENSORFLOW} --strategy single", "TF_CONFIG with --strategy", "one of 2 processes", TF_CONFIG
    ),
    "TF_CONFIG without a strategy": Mistake(TENSORFLOW, "TF_CONFIG with --strategy", "one of 2 processes", TF_CONFIG),
    "TF_CONFIG with mirrored": Mistake(
        f"{TENSORFLOW} --strategy mirrored", "TF_CONFIG with --strategy", "one of 2 processes", TF_CONFIG
    ),
    "TF_CONFIG that is no JSON": Mistake(MULTI_WORKER, "JSON in TF_CONFIG", "'{'", {"TF_CONFIG": "{"}),
    "TF_CONFIG that is no JSON, under PyTorch": Mistake(PYTORCH, "JSON in TF_CONFIG", "'{'", {"TF_CONFIG": "{"}),
    "TF_CONFIG nested deeply": Mistake(MULTI_WORKER, "JSON in TF_CONFIG", "'[[[", {"TF_CONFIG": "[" * 99999}),
    "TF_CONFIG with a number of 5,000 digits": Mistake(
        MULTI_WORKER, "JSON in TF_CONFIG", "'111", {"TF_CONFIG": "1" * 5000}
    ),
    "TF_CONFIG whose index is a truth value": Mistake(
        MULTI_WORKER, "a task whose type and index are in the cluster", "index True",
        {"TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "worker", "index": True}})},
    ),
    "TF_CONFIG with a port in Arabic": Mistake(
        MULTI_WORKER, "a list of HOST:PORT for 'worker'", "one with 'a:\\u0661'",
        {"TF_CONFIG": json.dumps({**CLUSTER, "cluster": {"worker": ["a:\u0661"]}})},
    ),
    "TF_CONFIG against mpirun": Mistake(
        MULTI_WORKER, "TF_CONFIG to say rank 0 of 2 as mpirun does", "worker 1, process 1 of 2",
        {**OPEN_MPI, "TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "worker", "index": 1}})},
    ),
    # Variables that libraries read.
    "OMP_NUM_THREADS a word": wrong({}, "OMP_NUM_THREADS", "many", "a whole number from 1 to 8192", command=PYTORCH),
    "OMP_NUM_THREADS 0": wrong({}, "OMP_NUM_THREADS", "0", "a whole number from 1 to 8192", command=PYTORCH),
    "OMP_NUM_THREADS 99999999": wrong(
        {}, "OMP_NUM_THREADS", "99999999", "a whole number from 1 to 8192", command=TENSORFLOW
    ),
    "HOROVOD_CACHE_CAPACITY negative": wrong(
        {}, "HOROVOD_CACHE_CAPACITY", "-1", "a whole number from 0 to 1048576", command=PYTORCH
    ),
    "HOROVOD_FUSION_THRESHOLD a word": wrong({}, "HOROVOD_FUSION_THRESHOLD", "64MB", "a whole number", command=PYTORCH),
    "HOROVOD_CYCLE_TIME nan": wrong({}, "HOROVOD_CYCLE_TIME", "nan", "a number from 0 to 60000", command=TENSORFLOW),
    "HOROVOD_GLOO_TIMEOUT_SECONDS 0": wrong(
        {}, "HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "a whole number from 1", command=PYTORCH
    ),
    "HOROVOD_ELASTIC a word": wrong({}, "HOROVOD_ELASTIC", "yes", "a whole number from 0 to 1", command=TENSORFLOW),
    "HOROVOD_CONTROLLER unknown": wrong({}, "HOROVOD_CONTROLLER", "nccl", "one of mpi, gloo", command=PYTORCH),
    "HOROVOD_CPU_OPERATIONS unknown": wrong({}, "HOROVOD_CPU_OPERATIONS", "tcp", "one of mpi, gloo", command=PYTORCH),
    "HOROVOD_LOG_LEVEL unknown": wrong({}, "HOROVOD_LOG_LEVEL", "loud", "one of trace, debug", command=PYTORCH),
    "HOROVOD_GLOO_IFACE unknown": wrong(
        {}, "HOROVOD_GLOO_IFACE", "eth99", "a network interface of this host, one of", command=PYTORCH
    ),
    "GLOO_SOCKET_IFNAME unknown": wrong({}, "GLOO_SOCKET_IFNAME", "eth99", "a network interface of this host"),
    # Reported once by all ranks of a launcher.
    "an environment that is wrong for both ranks of mpirun": Mistake(
        f"mpirun --oversubscribe -np 2 -x RANK=5 -x WORLD_SIZE=9 {DDP}",
        "RANK and WORLD_SIZE to say rank 0 of 2 as mpirun does", "RANK='5' and WORLD_SIZE='9'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_environments(name, tmp_path):
    check(MISTAKES[name], tmp_path)
