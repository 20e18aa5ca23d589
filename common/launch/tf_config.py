"""TF_CONFIG: addresses and roles of all processes of a TensorFlow cluster, in TensorFlow's format.

It is written from the addresses that the ranks have exchanged, unless a user or a Kubernetes operator has set it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from allstep.common.base.errors import UserError, quoted
from allstep.common.launch.placement import Placement

# Ranks are numbered in this order of roles.
_ORDER = ("chief", "ps", "worker")
ROLES = {"multi-worker-mirrored": ("chief", "worker"), "parameter-server": _ORDER}
"""Roles of processes under the strategies that use TF_CONFIG; parameter-server needs a process of each role."""


@dataclass(frozen=True)
class TFConfig:
    """Cluster and the role of one process in it."""

    cluster: dict[str, tuple[str, ...]]
    """Addresses (host:port) of the processes, by role."""
    role: str
    """Role of this process."""
    index: int
    """Number of this process among those of its role."""

    @property
    def members(self) -> list[tuple[str, int, str]]:
        """Role, index and host:port of all processes."""
        return [(role, index, address) for role in _ORDER for index, address in enumerate(self.cluster.get(role, ()))]

    def to_json(self) -> str:
        """Return the value of the environment variable TF_CONFIG."""
        return json.dumps({"cluster": self.cluster, "task": {"type": self.role, "index": self.index}})


def parameter_server_config(addresses: Sequence[str], server: str, rank: int) -> TFConfig:
    """Return a cluster for ParameterServerStrategy: rank 0 is the chief and has the parameters in `server`."""
    cluster = {"chief": (addresses[0],), "ps": (server,), "worker": tuple(addresses[1:])}
    return TFConfig(cluster, *(("worker", rank - 1) if rank else ("chief", 0)))


def parse(text: str, strategy: str) -> TFConfig:
    """Parse a user's TF_CONFIG for a strategy.

    Raises UserError if the text is not a TF_CONFIG, or is for another strategy.
    """
    content = _read(text)
    cluster = content["cluster"]
    for role in cluster:
        if role not in ROLES[strategy]:
            raise _wrong(f"the roles {', '.join(ROLES[strategy])} for {strategy}", quoted(role))
    missing = [role for role in ROLES[strategy] if not cluster.get(role)]
    if strategy == "parameter-server" and missing:
        raise _wrong(f"a {', a '.join(ROLES[strategy])} for {strategy}", f"no {missing[0]}")
    if len(cluster.get("chief", ())) > 1:
        raise _wrong("at most one chief", str(len(cluster["chief"])))
    addresses = sorted(address for group in cluster.values() for address in group)
    twice = [one for one, other in pairwise(addresses) if one == other]
    if twice:
        raise _wrong("an address of its own for each process", f"{twice[0]} twice")
    task = content.get("task")
    task = task if isinstance(task, dict) else {}
    role, index = task.get("type"), task.get("index")
    index = int(index) if isinstance(index, str) and re.fullmatch("[0-9]{1,7}", index) else index
    if not isinstance(role, str) or type(index) is not int or not 0 <= index < len(cluster.get(role, ())):
        raise _wrong("a task whose type and index are in the cluster", f"type {_shown(role)}, index {_shown(index)}")
    return TFConfig({role: tuple(addresses) for role, addresses in cluster.items()}, role, index)


def num_processes(text: str) -> int:
    """Return the number of processes in TF_CONFIG, whatever the strategy; 1 if it is not set.

    Raises UserError if the text is not a TF_CONFIG.
    """
    return sum(map(len, _read(text)["cluster"].values())) if text else 1


def find_placement(config: TFConfig, launched: Placement) -> Placement:
    """Return the placement that TF_CONFIG gives this process; a launcher's placement must agree with it.

    Raises UserError if the launcher's rank or world size differs.
    """
    members = config.members
    hosts = list(dict.fromkeys(_host(address) for _, _, address in members))
    host_of = [hosts.index(_host(address)) for _, _, address in members]
    rank = next(number for number, member in enumerate(members) if member[:2] == (config.role, config.index))
    if launched.launcher is None:
        return Placement(
            launcher="TF_CONFIG",
            rank=rank,
            world_size=len(members),
            local_rank=host_of[:rank].count(host_of[rank]),
            local_size=host_of.count(host_of[rank]),
            cross_rank=host_of[rank],
            hosts=tuple(hosts),
        )
    if (rank, len(members)) != (launched.rank, launched.world_size):
        raise UserError(
            f"expected TF_CONFIG to say rank {launched.rank} of {launched.world_size} as {launched.launcher} does, "
            f"received {config.role} {config.index}, process {rank} of {len(members)}; unset TF_CONFIG, and it is made "
            "for you"
        )
    return launched


def _read(text: str) -> dict:
    """Return the object in TF_CONFIG, with a cluster that maps roles to addresses.

    Raises UserError if the text is not such an object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of too many digits
        raise _wrong("JSON", f"{quoted(text)} ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("cluster"), dict):
        raise _wrong('{"cluster": {ROLE: [HOST:PORT, ...]}, "task": {"type": ROLE, "index": NUMBER}}', quoted(text))
    for role, addresses in content["cluster"].items():
        if not isinstance(addresses, list):
            raise _wrong(f"a list of HOST:PORT for {quoted(role)}", _shown(addresses))
        for address in addresses:
            if not _is_address(address):
                raise _wrong(f"a list of HOST:PORT for {quoted(role)}", f"one with {_shown(address)}")
    return content


def _shown(value: object) -> str:
    """Describe a JSON value briefly."""
    if isinstance(value, str):
        return quoted(value)
    return type(value).__name__ if isinstance(value, (list, dict)) else str(value)[:60]


def _wrong(expected: str, received: object) -> UserError:
    return UserError(
        f"expected {expected} in TF_CONFIG, received {received}; correct it, or unset it and use a launcher"
    )


def _is_address(text: object) -> bool:
    match = re.fullmatch(r"[!-~]{1,253}:([0-9]{1,5})", text) if isinstance(text, str) else None
    return bool(match) and 0 < int(match[1]) < 65536


def _host(address: str) -> str:
    return address.rpartition(":")[0]
