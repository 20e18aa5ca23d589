"""Hardware and settings as a user knows them: nominal bandwidths and kinds of links, and what is made of them."""

from dataclasses import dataclass
from typing import Annotated

from allstep.commands.forecast.allreduce import ALGORITHMS, Cluster, Link
from allstep.commands.forecast.forecast import BEST, Machine
from allstep.commands.forecast.parameters import Parameters
from allstep.commands.forecast.simulation import MIB, Fusion
from allstep.common.files.strict_json import Count, NonNegative, Positive, one_of, whole

GIGABIT = 1e9 / 8
INSIDE, RDMA, TCP = "inside", "rdma", "tcp"
KINDS = (INSIDE, RDMA, TCP)
"""Kinds of links on which a forecast depends: inside one host, or between hosts."""
_MIN_NVLINK_GBIT = 200.0
"""Nominal bandwidth from which a link in a host is taken for NVLink; PCIe 4.0 x16 has 252, of which 200 are reached."""
_MIN_RDMA_GBIT = 50.0
"""Nominal bandwidth from which a link between hosts is taken for RDMA, if the user does not say."""
_MICROSECONDS = {"nvlink": 3.4, "pcie": 5.7, RDMA: 14.0, TCP: 30.0}
"""Latency of a hop: NCCL's own estimates (src/graph/tuning.cc), and for TCP a system call and a copy on either side."""
DDP_BUCKETS = Fusion(25 * MIB, 0.0, buckets=True)


@dataclass(frozen=True)
class Site:
    """Hosts, links, and how gradients are exchanged."""

    ranks_per_node: Count = 8
    intra_gbit: Positive = 800.0
    """Nominal bandwidth of a GPU's link in a host, in one direction."""
    inter_gbit: Positive = 100.0
    """Nominal bandwidth of all network cards of a host."""
    link: Annotated[str, one_of("", RDMA, TCP)] = ""
    """Kind of link between hosts; empty: RDMA from 50 Gbit/s, or else TCP."""
    intra_us: NonNegative | None = None
    """Latency of a hop; None: usual for the kind of link."""
    inter_us: NonNegative | None = None
    algorithm: Annotated[str, one_of(*ALGORITHMS, BEST)] = BEST
    num_servers: Annotated[int, whole(0)] = 0
    fusion: Fusion = Fusion()
    overlap: bool = True
    wire_bytes: Count = 4
    gather_bytes: Annotated[int, whole(0)] = 0
    """Bytes that a sharded rank gathers for each weight; 0 if every rank has all weights."""

    @property
    def between(self) -> str:
        """Kind of link between hosts."""
        return self.link or (RDMA if self.inter_gbit >= _MIN_RDMA_GBIT else TCP)

    @property
    def within(self) -> str:
        """Kind of link in a host."""
        return "nvlink" if self.intra_gbit >= _MIN_NVLINK_GBIT else "pcie"

    @property
    def pattern(self) -> str:
        """Pattern of communication, as the fit counts them."""
        if self.gather_bytes:
            return "sharded"
        return self.algorithm if self.algorithm in ("host-memory", "parameter-servers") else "all-reduce"

    def kind(self, num_ranks: int) -> str:
        """Return the kind of link that decides a forecast for `num_ranks`."""
        return self.between if num_ranks > self.ranks_per_node else INSIDE

    def gbit(self, num_ranks: int) -> float:
        """Return the nominal bandwidth of that link."""
        return self.inter_gbit if num_ranks > self.ranks_per_node else self.intra_gbit

    def links(self, parameters: Parameters) -> tuple[Link, Link]:
        """Return the links in a host and between hosts."""
        intra = Link(
            _seconds(self.intra_us, self.within),
            self.intra_gbit * GIGABIT * getattr(parameters, self.within),
            parameters.contention,
        )
        inter = Link(
            _seconds(self.inter_us, self.between),
            self.inter_gbit * GIGABIT * getattr(parameters, self.between),
            parameters.tcp_contention if self.between == TCP else parameters.contention,
        )
        return intra, inter

    def machine(self, parameters: Parameters, links: tuple[Link | None, Link | None] = (None, None)) -> Machine:
        """Return the machine with these parameters; measured `links`, in a host and between, replace nominal ones."""
        intra, inter = (
            Link(measured.latency, measured.bandwidth, nominal.contention) if measured else nominal
            for measured, nominal in zip(links, self.links(parameters), strict=True)
        )
        return Machine(
            Cluster(self.ranks_per_node, intra, inter, parameters.host_memory * 1e9, self.num_servers),
            algorithm=self.algorithm,
            fusion=self.fusion,
            wire_bytes=self.wire_bytes,
            crowding=1 + parameters.crowding,
            overlap=self.overlap,
            gather_bytes=self.gather_bytes,
        )


def _seconds(microseconds: float | None, kind: str) -> float:
    return (_MICROSECONDS[kind] if microseconds is None else microseconds) / 1e6
