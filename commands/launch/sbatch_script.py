"""The batch script of `allstep launch --slurm`, as a pure function of what was asked for.

Slurm sends its notice to the script alone, which passes it on: the ranks save a checkpoint and end, and the script
queues its job again. Slurm queues it again by itself where it takes the hosts away without a notice, or one fails.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOTICE_SECONDS = 120


@dataclass(frozen=True)
class Each:
    """A flag of which each task of a job array has another value."""

    flag: str
    """Without its hyphens."""
    values: tuple[str, ...]
    """Of letters, digits and what means nothing to a shell."""


@dataclass(frozen=True)
class BatchJob:
    """What is to be run where."""

    command: tuple[str, ...]
    """A trainer with its flags, or a command of allstep."""
    output_dir: str
    """Its --output-dir."""
    trains: bool
    """Whether it is a trainer, started on every rank; a command of allstep starts its ranks itself, on one host."""
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus: bool
    """Whether each rank has a GPU."""
    launcher: str
    """mpirun or srun."""
    by_mpi: bool
    """Whether the ranks are to be an MPI job, as Horovod's."""
    options: dict[str, str]
    """Of sbatch, by their long names: job-name, time, partition, account."""
    each: Each | None


def to_script(job: BatchJob, *, written_by: str, repository: Path, environment: Path) -> str:
    """The script.

    Args:
        written_by: the command that asked for it, in one line.
        environment: the virtual environment whose programs run.
    """
    words = [shlex.quote(word) for word in job.command]
    output_dir = shlex.quote(job.output_dir)
    settings = [f"cd {shlex.quote(str(repository))}", f"export PATH={shlex.quote(f'{environment}/bin')}:$PATH"]
    if job.each:
        settings += [f"values=({' '.join(job.each.values)})", "value=${values[$SLURM_ARRAY_TASK_ID]}"]
        output_dir = f'{output_dir}/"$value"'
        words += [f"--{job.each.flag}", '"$value"']
    if job.command[:2] == ("allstep", "compare"):
        # It compares on one host, and refuses to go on on another one, to which the job may be sent after a restart.
        output_dir = f'{output_dir}/"$SLURMD_NODENAME"'
    words += ["--output-dir", output_dir]
    settings.append("job=$SLURM_JOB_ID")
    if job.trains:
        if job.launcher == "srun" and job.by_mpi:
            # Else Open MPI's own PMIx has a page to say if it lacks a way of signing that Slurm's has beside others.
            settings.append("export OMPI_MCA_mca_base_component_show_load_errors=0")
        settings += ["resume=()", _RESUME.format(output_dir=output_dir)]
        words = [*_start(job), "python", *words, '"${resume[@]}"']
    line = " ".join(words)
    if not job.trains:
        # The launchers that it calls would take the one task of the allocation for all the ranks that may be. The
        # script itself keeps them: scontrol may need SLURM_CONF.
        line = f'(unset "${{!SLURM_@}}" && exec {line})'
    return _SCRIPT.format(
        written_by=written_by,
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in _options(job).items()),
        settings="\n".join(settings),
        line=line,
        # A trainer saves on either; other commands end on SIGTERM, and go on when they are called again.
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


_RESUME = """\
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && compgen -G {output_dir}/checkpoints/'*' >/dev/null; then
  resume=(--resume latest)
fi"""

_SCRIPT = """\
#!/bin/bash
# Written by: {written_by}
{options}
#SBATCH --requeue
set -euo pipefail
{settings}

# Before the time limit or a pre-emption: what runs saves its state and ends; then the job waits for its turn again.
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
