"""Jobs on one host: start of ranks without a launcher, exit status of the job, and the restriction to loopback.

Each rank runs this same program, with its placement in the environment (`common.launch.placement` reads it).
"""

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, MutableMapping

from allstep.common.base.errors import UserError, quote
from allstep.common.launch.placement import Placement, spawned_environment

# Time for a rank to end before it is killed. After one of NOTICES, ranks may take as long as they need to save.
_GRACE_SECONDS = 8.0
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP)
"""Signals that announce the end of the job: by a scheduler, or by a terminal that closes, unless nohup ignores it."""
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def spawn(num_ranks: int) -> int:
    """Run this program as `num_ranks` ranks and wait for them; if one fails, end the others.

    Signals are forwarded to the ranks, and no rank outlives this process.

    Returns: the exit status of the job: that of the first rank that failed, or 128 + N if signal N ended it; 0 if all
    ranks succeeded, which includes ranks that were asked to stop and have saved.
    """
    ranks: list[subprocess.Popen] = []
    received: list[int] = []
    forwarded = [number for number in (signal.SIGINT, *NOTICES) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in forwarded}
    try:
        # The rendezvous socket of the ranks stays open from here on, so no other process can take its port.
        with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as listener:
            for rank in range(num_ranks):
                ranks.append(_start(rank, num_ranks, listener))
        return _wait(ranks, received)
    finally:
        _end(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(rank: int, num_ranks: int, listener: socket.socket) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, **spawned_environment(rank, num_ranks, listener)},
        pass_fds=[listener.fileno()] if rank == 0 else [],
        # Ctrl-C in a terminal then reaches only this process, which forwards it once.
        start_new_session=True,
        preexec_fn=_die_with_parent(os.getpid()),
    )


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)  # loaded before the fork, because little is safe after it

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return prepare


def _wait(ranks: list[subprocess.Popen], received: list[int]) -> int:
    while True:
        if received:
            _signal(ranks, received[0])
            patience = math.inf if received[0] in NOTICES else _GRACE_SECONDS
            _wait_for_all(ranks, patience, until=lambda: len(received) > 1)
            return 128 + received[0] if any(rank.returncode != 0 for rank in ranks) else 0
        failed = [rank.returncode for rank in ranks if rank.poll()]
        if failed:
            # A killed rank, whose status is below 0, is the cause; the others exit because they have lost it.
            return _status(min(failed))
        if all(rank.returncode == 0 for rank in ranks):
            return 0
        time.sleep(_POLL_SECONDS)


def _wait_for_all(ranks: list[subprocess.Popen], seconds: float, until: Callable[[], bool] = bool) -> bool:
    """Wait for all ranks, and return whether they ended in time and before `until` became true."""
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline or until():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end(ranks: list[subprocess.Popen]) -> None:
    _signal(ranks, signal.SIGTERM)
    if not _wait_for_all(ranks, _GRACE_SECONDS):
        _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _signal(ranks: list[subprocess.Popen], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


_MPI_SEGMENT_BYTES = 4 * 2**20  # btl_vader_segment_size
# Default that horovodrun passes to mpirun.
_BTL_OF_HOROVODRUN = "^openib"


def stay_on_host(placement: Placement, environ: MutableMapping[str, str] = os.environ) -> None:
    """Configure the communication libraries, before they start, for a job on a single host.

    In a job of several hosts it does nothing. Settings of the user are kept. docs/security.md lists what still listens.
    Raises UserError if the job has several hosts, and rank 0's host cannot be resolved here.
    """
    if placement.local_size < placement.world_size:
        if not resolves(name := environ.get("MASTER_ADDR") or "127.0.0.1"):
            raise UserError(
                f"MASTER_ADDR names a host that cannot be resolved here: {quote(name)}; add it to /etc/hosts"
            )
        return
    if not resolves(environ.get("MASTER_ADDR") or "127.0.0.1"):  # torchrun gives the host's name, known to it or not
        environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    # Open MPI's TCP transport listens at every address, whichever interface it is given, so use only shared memory.
    if environ.get("OMPI_MCA_btl", _BTL_OF_HOROVODRUN) == _BTL_OF_HOROVODRUN:
        environ["OMPI_MCA_btl"] = "self,vader"


def resolves(name: str) -> bool:
    """Return whether the name or address of a host has an address here."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def check_shared_memory(placement: Placement) -> None:
    """Refuse a /dev/shm without room for the buffers of Open MPI's ranks on this host, which say little without it."""
    if placement.local_size < 2 or "OMPI_COMM_WORLD_RANK" not in os.environ or not os.path.isdir("/dev/shm"):
        return
    status = os.statvfs("/dev/shm")
    free, needed = status.f_bavail * status.f_frsize, placement.local_size * _MPI_SEGMENT_BYTES
    if free < needed:
        raise UserError(
            f"/dev/shm has {free} bytes left, and MPI takes {needed} for {placement.local_size} ranks; remove what is "
            "left there, or start the container with --shm-size=1g"
        )
