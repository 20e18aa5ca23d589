"""Jobs of `allstep launch` on a real Slurm in the bed, which takes their hosts away and gives them back.

Oracles: an undisturbed run's weights, bit for bit, and Slurm's own word on each job.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import bed
from ranks import REPOSITORY, events, last, train
from requirements import need

need("slurmctld", "slurmd", "sbatch", "munged", "setpriv")

STRATEGIES = {"mpirun": "horovod", "srun": "ddp"}
FLAGS = ("--deterministic", "--model", "mlp", "--epochs", "12", "--log-every", "1")
FLAGS = (*FLAGS, "--stall-timeout", "0", "--fault-timeout", "200")
# Both jobs share the two hosts. Rank 1 of each is stopped until Slurm has given notice, or it could be through before.
SCRIPT = """
wait_for() {{ until eval "$1" 2>/dev/null; do sleep 0.05; done; }}
signal_rank_1() {{ # SIGNAL LAUNCHER
  for process in $(ip netns pids server2 | sort -n); do
    grep -qzF "{output}/$2" /proc/$process/cmdline && grep -qz '^SLURM_LOCALID=' /proc/$process/environ &&
      kill -$1 $process
  done
}}
mkdir {output} && rm -f slurm-[12].out
for launcher in {launchers}; do
  allstep launch --slurm --nodes 2 --launcher ${{launcher%:*}} --submit -- \\
    pytorch/train.py --strategy ${{launcher#*:}} --output-dir {output}/${{launcher%:*}} {flags}
done
for launcher in {launchers}; do
  (wait_for "grep -q '\\"step\\": 3' {output}/${{launcher%:*}}/metrics.jsonl"; signal_rank_1 STOP ${{launcher%:*}}) &
done
wait
sbatch --partition urgent --nodes 2 --exclusive --output /dev/null --wrap true
for job in 1 2; do wait_for "! scontrol show job $job | grep -q PreemptTime=None"; done
wait_for 'grep -q "Forwarding signal" slurm-1.out'
for launcher in {launchers}; do signal_rank_1 CONT ${{launcher%:*}}; done
wait_for '! squeue -h | grep -q .'
for job in 1 2; do scontrol show job $job; cat slurm-$job.out; done
rm slurm-[12].out
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    """The events of the two jobs, and of an undisturbed one: on two ranks the sums of both strategies have its bits."""
    folder = tmp_path_factory.mktemp("slurm")
    launchers = " ".join(f"{launcher}:{strategy}" for launcher, strategy in STRATEGIES.items())
    script = SCRIPT.format(output=folder / "runs", launchers=launchers, flags=" ".join(FLAGS))
    result = bed.run(Path(__file__).with_name("slurm.sh"), "2", "bash", "-c", script, timeout=400)
    assert result.returncode == 0, result.output
    assert len(re.findall(r"Restarts=1 .*ExitCode=0:0", result.stdout)) == len(STRATEGIES), result.output
    assert result.stdout.count("stopped after step") == len(STRATEGIES), result.output
    assert not list(REPOSITORY.glob("slurm-*.out"))
    return {
        **{launcher: events(folder / "runs" / launcher) for launcher in STRATEGIES},
        "undisturbed": train("pytorch", "horovodrun-gloo", 2, folder / "undisturbed", *FLAGS),
    }


@pytest.mark.parametrize("launcher", STRATEGIES)
def test_a_pre_empted_job_ends_in_the_bits_of_an_undisturbed_one(launcher, runs):
    run, undisturbed = runs[launcher], runs["undisturbed"]
    starts = [(one["launcher"], one["strategy"], one["world_size"]) for one in run if one["event"] == "start"]
    assert starts == [(launcher, STRATEGIES[launcher], 2)] * 2
    steps, expected = ([one["step"] for one in each if one["event"] == "step"] for each in (run, undisturbed))
    assert steps == expected
    assert last(run, "end")["weights_checksum"] == last(undisturbed, "end")["weights_checksum"]
