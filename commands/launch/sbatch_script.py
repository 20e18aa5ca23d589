"""Batch script of `allstep launch --slurm`, as a pure function of the job.

Slurm sends its warning signal only to the script, which forwards it: the ranks save a checkpoint and end, and the
script requeues its job. Slurm itself requeues the job if it takes the hosts away without a warning, or if one fails.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOTICE_SECONDS = 120


@dataclass(frozen=True)
class Each:
    """Flag that has a different value in each task of a job array."""

    flag: str
    """Name of the flag, without hyphens."""
    values: tuple[str, ...]
    """Values of letters, digits and characters without a meaning in a shell."""


@dataclass(frozen=True)
class BatchJob:
    """Command and resources of a batch job."""

    command: tuple[str, ...]
    """Trainer with its flags, or a command of allstep."""
    output_dir: str
    """Value of the command's --output-dir."""
    trains: bool
    """Whether the command is a trainer, started on every rank; a command of allstep starts its ranks on one host."""
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus: bool
    """Whether each rank has a GPU."""
    launcher: str
    """Name of the launcher: mpirun or srun."""
    by_mpi: bool
    """Whether the ranks must form an MPI job, as with Horovod."""
    options: dict[str, str]
    """Options of sbatch by their long names: job-name, time, partition, account."""
    each: Each | None


def to_script(job: BatchJob, *, written_by: str, repository: Path, environment: Path) -> str:
    """Return the script of a job.

    `written_by` is the command line that generates the script, in one line; `environment` the virtual environment whose
    programs run.
    """
    words = [shlex.quote(word) for word in job.command]
    output_dir = shlex.quote(job.output_dir)
    settings = [f"cd {shlex.quote(str(repository))}", f"export PATH={shlex.quote(f'{environment}/bin')}:$PATH"]
    if job.each:
        settings += [f"values=({' '.join(job.each.values)})", "value=${values[$SLURM_ARRAY_TASK_ID]}"]
        output_dir = f'{output_dir}/"$value"'
        words += [f"--{job.each.flag}", '"$value"']
    if job.command[:2] == ("allstep", "compare"):
        # A comparison cannot continue on another host, on which Slurm may restart the job.
        output_dir = f'{output_dir}/"$SLURMD_NODENAME"'
    words += ["--output-dir", output_dir]
    settings.append("job=$SLURM_JOB_ID")
    if job.trains:
        if job.launcher == "srun" and job.by_mpi:
            # Otherwise Open MPI's PMIx prints a page of warnings if it lacks a security module of Slurm's PMIx.
            settings.append("export OMPI_MCA_mca_base_component_show_load_errors=0")
        words = [*_start(job), "python", *words, "--resume", "auto"]
    line = " ".join(words)
    if not job.trains:
        # Launchers that the command calls would take the allocation's single task for the limit of ranks, so unset
        # Slurm's variables. The script keeps them, because scontrol may need SLURM_CONF.
        line = f'(unset "${{!SLURM_@}}" && exec {line})'
    return _SCRIPT.format(
        written_by=written_by,
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in _options(job).items()),
        settings="\n".join(settings),
        line=line,
        # A trainer saves on either signal; other commands end on SIGTERM, and continue when they are called again.
        signal="USR1" if job.trains else "TERM",
    )


def _options(job: BatchJob) -> dict[str, str]:
    options = {
        **job.options,
        "nodes": str(job.nodes if job.trains else 1),
        "ntasks-per-node": str(job.ranks_per_node if job.trains else 1),
        "cpus-per-task": str(job.cpus_per_rank),
        "signal": f"B:USR1@{NOTICE_SECONDS}",
        "open-mode": "append",
    }
    if job.gpus:
        options["gpus-per-node"] = str(job.ranks_per_node)
    if job.each:
        options["array"] = f"0-{len(job.each.values) - 1}"
    return options


def _start(job: BatchJob) -> Sequence[str]:
    if job.launcher == "srun":
        mpi = ("--mpi=pmix",) if job.by_mpi else ()
        return ("srun", *mpi, f"--cpus-per-task={job.cpus_per_rank}", "--kill-on-bad-exit=1")
    return ("mpirun", "-np", str(job.nodes * job.ranks_per_node), "--bind-to", "none", "-x", "PATH")


_SCRIPT = """\
#!/bin/bash
# Written by: {written_by}
{options}
#SBATCH --requeue
set -euo pipefail
{settings}

# Before the time limit or a pre-emption, the command saves its state and ends, and the job is requeued.
noticed=
trap 'noticed=yes; trap "" USR1; kill -{signal} "${{!:-}}" || {{ scontrol requeue "$job"; exit; }}' USR1
{line} &
status=0
wait "$!" || status=$?
if [ -n "$noticed" ]; then
  wait "$!" || true # the notice had ended the first wait
  scontrol requeue "$job"
fi
exit "$status"
"""
