"""Ranks of torchrun on two hosts, one of which is killed and returns.

Oracle: an undisturbed run of `single`.
"""

from __future__ import annotations

import shlex
from contextlib import closing

import pytest
from cluster import bed
from jobs import losses
from ranks import BIN, REPOSITORY, events, train

from allstep.commands.soak.elastic_job import STORE, Follower

pytestmark = pytest.mark.cold

FLAGS = ("--global-batch-size", 32, "--log-every", 1, "--model", "mlp", "--slices", 4)
AGENT = (
    "torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint server1:29500 "
    "--rdzv-conf last_call_timeout=3,keep_alive_interval=1 pytorch/train.py --elastic --checkpoint-every 10"
)
# The second agent on server2 starts once the file exists.
JOB = "{server1} & {server2} & until [ -e {returns} ]; do sleep 0.1; done; {server2} & wait"
KILL_HOST = """
for process in $(ip netns pids server2); do
  grep -qzE 'torchrun|train.py' /proc/$process/cmdline && kill -9 $process
done
"""
STOP = """
for process in $(ip netns pids server1 | sort -n); do
  grep -qz '^RANK=' /proc/$process/environ && exec kill -USR1 $process
done
"""


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_host_that_is_killed_and_returns(strategy, tmp_path):
    output_dir, returns = tmp_path / "run", tmp_path / "returns"
    flags = map(str, (*FLAGS, "--strategy", strategy, "--epochs", 1000, "--output-dir", output_dir))
    store = " ".join(f"{name}={value}" for name, value in STORE.items())
    there = f"cd {REPOSITORY}; . {BIN}/activate; export OMP_NUM_THREADS=1 {store}; {AGENT} {shlex.join(flags)}"
    agents = {host: f"ssh {host} {shlex.quote(there)}" for host in ("server1", "server2")}
    with closing(Follower(output_dir / "metrics.jsonl")) as follower:

        def formed(num_starts: int, num_ranks: int) -> bool:
            """Return whether `num_ranks` ranks have trained for a while since the n-th start."""
            stand = follower.stand()
            return (stand.num_starts, stand.num_ranks) == (num_starts, num_ranks) and stand.steps_since > 20

        with bed.running("bash", "-c", JOB.format(**agents, returns=returns), output=tmp_path / "log") as job:
            job.wait_until(lambda: formed(1, 4))
            job.inside("bash", "-c", f"{KILL_HOST}:")
            job.wait_until(lambda: formed(2, 2))
            returns.touch()
            job.wait_until(lambda: formed(3, 4))
            job.inside("bash", "-c", STOP)
            assert job.process.wait(60) == 0, job.output.read_text()
    disturbed = [event for event in events(output_dir) if event["event"] == "step"]
    assert [event["step"] for event in disturbed] == list(range(1, len(disturbed) + 1))
    num_steps = len(disturbed)
    undisturbed = tmp_path / "undisturbed"
    until = ("--strategy", "single", "--epochs", num_steps // 40 + 1, "--checkpoint-every", num_steps)
    expected = train("pytorch", "alone", 1, undisturbed, *FLAGS, *until, "--keep-checkpoints", 100)
    assert list(losses(disturbed).items()) == list(losses(expected).items())[:num_steps]
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-{num_steps:08d}/{name}"
        assert (output_dir / last).read_bytes() == (undisturbed / last).read_bytes()
