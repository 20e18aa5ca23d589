"""A job of `allstep launch` on a real Slurm in the bed, which takes its hosts away and gives them back.

Oracles: an undisturbed run's weights, bit for bit, and Slurm's own word on the job.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import bed
from ranks import REPOSITORY, events, last, train
from requirements import need

need("slurmctld", "slurmd", "sbatch", "munged", "setpriv")

FLAGS = ("--deterministic", "--epochs", "6", "--log-every", "1", "--stall-timeout", "0", "--fault-timeout", "200")
WAIT_FOR = 'wait_for() { until eval "$1" 2>/dev/null; do sleep 0.05; done; }\n'
# Rank 1 is stopped until the notice is there, or the run could be through before: fast machines need a second for it.
SCRIPT = """
signal_rank_1() {{
  for process in $(ip netns pids server2 | sort -n); do
    grep -qz '^OMPI_COMM_WORLD_RANK=1$' /proc/$process/environ && kill -$1 $process
  done
}}
allstep launch --slurm --nodes 2 --submit -- pytorch/train.py --output-dir {output} {flags}
wait_for 'grep -q "\\"step\\": 3" {output}/metrics.jsonl'
signal_rank_1 STOP
sbatch --partition urgent --nodes 2 --exclusive --output /dev/null --wrap true
wait_for 'grep -q "Forwarding signal" slurm-1.out'
signal_rank_1 CONT
wait_for '! squeue -h | grep -q .'
scontrol show job 1
cat slurm-1.out
rm slurm-1.out
"""


def test_a_pre_empted_job_ends_in_the_bits_of_an_undisturbed_one(tmp_path):
    output = tmp_path / "run"
    script = WAIT_FOR + SCRIPT.format(output=output, flags=" ".join(FLAGS))
    result = bed.run(Path(__file__).with_name("slurm.sh"), "2", "bash", "-c", script, timeout=400)
    assert result.returncode == 0, result.output
    assert re.search(r"Restarts=1 .*ExitCode=0:0", result.stdout), result.output
    assert result.stdout.count("stopped after step") == 1, result.output
    assert not (REPOSITORY / "slurm-1.out").exists()
    undisturbed = train("pytorch", "horovodrun-mpi", 2, tmp_path / "undisturbed", *FLAGS)
    found = events(output)
    assert [event["event"] for event in found].count("start") == 2
    steps, expected = ([one["step"] for one in run if one["event"] == "step"] for run in (found, undisturbed))
    assert steps == expected
    assert last(found, "end")["weights_checksum"] == last(undisturbed, "end")["weights_checksum"]


SRUN = """
allstep launch --slurm --nodes 2 --launcher srun --submit -- \\
  pytorch/train.py --strategy ddp --model mlp --epochs 1 --output-dir {output}
wait_for '! squeue -h | grep -q .'
scontrol show job 1
cat slurm-1.out
rm slurm-1.out
"""


@pytest.mark.full
def test_srun_starts_the_ranks_of_ddp_on_both_hosts(tmp_path):
    script = WAIT_FOR + SRUN.format(output=tmp_path / "run")
    result = bed.run(Path(__file__).with_name("slurm.sh"), "2", "bash", "-c", script, timeout=200)
    assert result.returncode == 0 and "ExitCode=0:0" in result.stdout, result.output
    start = last(events(tmp_path / "run"), "start")
    assert (start["strategy"], start["launcher"], start["world_size"]) == ("ddp", "srun", 2)
