"""Jobs of `allstep launch` on a real Slurm, which preempts and resumes them on simulated hosts.

Oracles: the weights of an undisturbed run, bit for bit; the arguments of each array task; and Slurm's reports.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import bed
from ranks import REPOSITORY, events, last, run, train
from requirements import need

need("slurmctld", "slurmd", "sbatch", "munged", "setpriv")

STRATEGIES = {"mpirun": "horovod", "srun": "ddp"}
FLAGS = ("--deterministic", "--model", "mlp", "--epochs", "12", "--log-every", "1")
FLAGS = (*FLAGS, "--stall-timeout", "0", "--fault-timeout", "200")
# The values of an array, one per task; the last one fails.
BATCH_SIZES = ("32", "64", "0")
# The jobs share the two hosts. Processes that could finish before Slurm has given notice are stopped until then:
# rank 1 of each trainer, and the first two tasks of the array.
SCRIPT = """
wait_for() {{ until eval "$1" 2>/dev/null; do sleep 0.05; done; }}
signal_rank_1() {{ # SIGNAL LAUNCHER
  for process in $(ip netns pids server2 | sort -n); do
    grep -qzF "{output}/$2" /proc/$process/cmdline && grep -qz '^SLURM_LOCALID=' /proc/$process/environ &&
      kill -$1 $process
  done
}}
mkdir {output} && rm -f slurm-[123]*.out
for launcher in {launchers}; do
  allstep launch --slurm --nodes 2 --launcher ${{launcher%:*}} --submit -- \\
    pytorch/train.py --strategy ${{launcher#*:}} --output-dir {output}/${{launcher%:*}} {flags}
done
allstep launch --slurm --each batch-sizes={batch_sizes} --submit -- allstep compare --quick --frameworks pytorch \\
  --strategies independent --ranks 1 --models mlp --workloads synthetic-weak --output-dir {output}/array
for launcher in {launchers}; do
  (wait_for "grep -q '\\"step\\": 3' {output}/${{launcher%:*}}/metrics.jsonl"; signal_rank_1 STOP ${{launcher%:*}}) &
done
for size in 32 64; do
  (wait_for "ls {output}/array/$size/*/compare.json"; pkill -STOP -f "allstep compare .*{output}/array/$size/") &
done
wait
sbatch --partition urgent --nodes 2 --exclusive --output /dev/null --wrap true
for job in 1 2 3_0 3_1; do wait_for "! scontrol show job $job | grep -q PreemptTime=None"; done
wait_for 'grep -q "Forwarding signal" slurm-1.out'
for launcher in {launchers}; do signal_rank_1 CONT ${{launcher%:*}}; done
pkill -CONT -f "allstep compare .*{output}/array/"
wait_for '! squeue -h | grep -q .'
for job in 1 2 3; do scontrol show job $job; cat slurm-$job*.out; done
rm slurm-[123]*.out
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> tuple[Path, str]:
    """Return the folder of the jobs' files, and Slurm's report after all had ended."""
    folder = tmp_path_factory.mktemp("slurm")
    launchers = " ".join(f"{launcher}:{strategy}" for launcher, strategy in STRATEGIES.items())
    script = SCRIPT.format(
        output=folder / "runs", launchers=launchers, flags=" ".join(FLAGS), batch_sizes=",".join(BATCH_SIZES)
    )
    result = bed.run(Path(__file__).with_name("slurm.sh"), "2", "bash", "-c", script, timeout=400)
    assert result.returncode == 0, result.output
    assert not list(REPOSITORY.glob("slurm-*.out"))
    return folder / "runs", result.output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    """Return the metrics of an undisturbed run; on two ranks the sums of both strategies have the same bits."""
    return train("pytorch", "horovodrun-gloo", 2, tmp_path_factory.mktemp("undisturbed"), *FLAGS)


def ended(said: str, job: str) -> tuple[str, str]:
    """Return how often Slurm restarted a job, and the job's exit status."""
    [found] = re.findall(rf"^JobId={job}\b.*?Restarts=(\d+) .*?ExitCode=(\d+):0", said, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize(("job", "launcher"), list(enumerate(STRATEGIES, 1)))
def test_a_pre_empted_job_ends_in_the_bits_of_an_undisturbed_one(job, launcher, cluster, undisturbed):
    folder, said = cluster
    assert ended(said, f"{job} JobName=allstep") == ("1", "0"), said
    assert said.count("stopped after step") == len(STRATEGIES), said
    run = events(folder / launcher)
    starts = [(one["launcher"], one["strategy"], one["world_size"]) for one in run if one["event"] == "start"]
    assert starts == [(launcher, STRATEGIES[launcher], 2)] * 2
    steps, expected = ([one["step"] for one in each if one["event"] == "step"] for each in (run, undisturbed))
    assert steps == expected
    assert last(run, "end")["weights_checksum"] == last(undisturbed, "end")["weights_checksum"]


def test_an_array_compares_in_tasks_of_its_own(cluster):
    """Two tasks are preempted and go on, the third one fails with a reason; one report has the others' measurements."""
    folder, said = cluster
    tasks = [ended(said, rf"\d+ ArrayJobId=3 ArrayTaskId={task}") for task in range(len(BATCH_SIZES))]
    assert tasks == [("1", "0"), ("1", "0"), ("0", "2")], said
    assert said.count("expected --batch-sizes to be at least 1, received 0") == 1, said
    result = run("allstep", "report", folder / "array")
    assert result.returncode == 0, result.output
    measured = re.findall(r"batch (\d+), float32$", (folder / "array" / "report.md").read_text(), re.MULTILINE)
    assert measured == ["32", "64"]
