"""An elastic job of torchrun that is started to be disturbed: an agent for each of two hosts, both of them this one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from allstep.commands.shared.records.runs import FILE
from allstep.commands.soak.elastic_job import LOCAL, NUM_RANKS, PATIENCE_SECONDS, ElasticJob, Follower
from allstep.commands.soak.training import Training, training
from allstep.common.launch.rendezvous import free_ports

STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without which ranks that are started anew wait for those before them (docs/elastic.md)."""


class TorchrunJob(ElasticJob):
    """A job of two agents, of which the second can leave: the first has the store by which they meet."""

    def __init__(self, job: Training, program: str, follower: Follower, second: list[object]) -> None:
        """`second` is the command of the second agent."""
        super().__init__(job, program, LOCAL, follower)
        self._second = second
        self._agent = job.start(second)
        self._can_leave = LOCAL.names[1:]

    def leave(self, host: str) -> Callable[[], None]:
        agent = self._agent
        self._job.processes.remove(agent)
        agent.send_signal(signal.SIGTERM)
        return lambda: self._return(agent)

    def _return(self, before: subprocess.Popen) -> None:
        before.wait(PATIENCE_SECONDS)
        self._agent = self._job.start(self._second)


@contextmanager
def torchrun_job(program: str, directory: Path, *flags: object) -> Iterator[ElasticJob]:
    """A job of `torchrun -m program`, as `elastic_job.elastic_job` has one of horovodrun."""
    output_dir = directory / "run"
    with free_ports(1) as [port]:
        endpoint = f"localhost:{port}"

    def agent(*, has_store: bool) -> list[object]:
        meeting = f"is_host={int(has_store)},last_call_timeout=3,keep_alive_interval=1"
        return [
            *("torchrun", "--nnodes", "1:2", "--nproc-per-node", NUM_RANKS // 2, "--max-restarts", 1_000_000),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "soak"),
            *("--rdzv-conf", meeting, "--local-addr", "127.0.0.1"),
            *("-m", program, *flags, "--output-dir", output_dir),
        ]

    with (
        closing(Follower(output_dir / FILE)) as follower,
        training(agent(has_store=True), output_dir, NUM_RANKS, environ=STORE) as job,
    ):
        yield TorchrunJob(job, program, follower, agent(has_store=False))
