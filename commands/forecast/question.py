"""The question of a command line: workload, site and parameters, from flags, runs, links and fitted defaults."""

import math
from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.forecast.allreduce import Link
from allstep.commands.forecast.fitting import CPU_BOUNDS, calibrated, distance, efficiency_range
from allstep.commands.forecast.flags import RANKS_PER_NODE, flag_of
from allstep.commands.forecast.forecast import Forecast, Machine, Workload, forecast
from allstep.commands.forecast.measured_runs import MeasuredRun, read_link, read_run
from allstep.commands.forecast.networks import Network, known_networks, read_model, read_network, uniform
from allstep.commands.forecast.parameters import BOUNDS, Parameters, fitted
from allstep.commands.forecast.simulation import MIB, Fusion
from allstep.commands.forecast.site import DDP_BUCKETS, Site
from allstep.common.base.errors import UserError, quote
from allstep.common.cli.strategy_flags import FUSION_THRESHOLD_ON_CPU

_CPU_WIDENING = 2.0
"""Factor by which ranges are wider for ranks on CPUs, to which nothing was fitted."""
_UNMEASURED_WIDENING = 1.5
"""Factor by which they are wider for patterns that no publication measured: no overlap, accumulated gradients."""
_PATTERN_FLAGS = {"algorithm", "sharded", "buckets", "fusion_mib", "cycle_ms", "no_overlap"}


@dataclass(frozen=True)
class Question:
    """A workload on a site, with the parameters that are fitted, given or calibrated."""

    plain_workload: Workload
    """The workload without jitter and tail."""
    site: Site
    parameters: Parameters
    extras: dict[str, float]
    """Fields of the machine that only flags give."""
    links: tuple[Link | None, Link | None]
    """Measured links in a host and between hosts."""
    given: frozenset[str]
    """Names of the flags that are given."""
    critical_batch: float
    calibrated_ranks: int = 0
    """Largest number of ranks of the runs that were calibrated on; 0 without any."""
    on_cpu: bool = False
    has_jitter: bool = False
    """Whether jitter is given or measured, and not calibrated."""

    @property
    def workload(self) -> Workload:
        return self.plain_workload.assuming(self.parameters)

    @property
    def machine(self) -> Machine:
        return replace(self.site.machine(self.parameters, self.links), **self.extras)

    def efficiency(self, parameters: Parameters, num_ranks: int) -> float:
        """Return the efficiency that is forecast with other parameters."""
        other = replace(self, parameters=parameters)
        return forecast(other.workload, other.machine, num_ranks).efficiency

    def limits(self, found: Forecast) -> tuple[float, float]:
        """Return the 10 and 90 % limits of an efficiency."""
        return efficiency_range(
            found.efficiency,
            self.site,
            found.num_ranks,
            fitted(),
            baseline_ranks=self.plain_workload.baseline_ranks,
            calibrated_ranks=self.calibrated_ranks,
            widening=self.widening,
        )

    @property
    def widening(self) -> float:
        """Factor by which ranges are wider for what no publication measured."""
        is_measured = self.site.overlap and self.plain_workload.passes == 1
        return (_CPU_WIDENING if self.on_cpu else 1.0) * (1.0 if is_measured else _UNMEASURED_WIDENING)

    def known_causes(self, num_ranks: int) -> set[str]:
        """Return the causes of lost time whose values are given or measured, for this number of ranks."""
        is_wide = num_ranks > self.site.ranks_per_node
        prefix = "inter" if is_wide else "intra"
        is_measured = self.links[is_wide] is not None
        conditions = {
            "bandwidth": is_measured or f"{prefix}_gbit" in self.given,
            "latency": is_measured or f"{prefix}_us" in self.given,
            "negotiation": bool(self.given & {"cycle_ms", "request_us"}),
            "stragglers": self.has_jitter,
            "crowded nodes": "crowding" in self.given,
            "contention": "contention" in self.given,
        }
        return {name for name, holds in conditions.items() if holds}

    def is_far(self, ranks: Collection[int]) -> bool:
        """Return whether the range of one of these is wider for being far from what was fitted."""
        return self.widening > 1 or any(distance(self.site, number, fitted()) > 1 for number in ranks)


def read_question(flags: Namespace, given: frozenset[str]) -> Question:
    """Return what the flags ask. Raises UserError if a file cannot be read, or runs and flags do not fit together."""
    runs = _read_runs(flags.run or ())
    first = runs[0] if runs else None
    site = _site(flags, given, runs)
    usual = fitted().values
    jitter = flags.jitter if flags.jitter is not None else first and first.jitter
    on_cpu = bool(first and first.device == "cpu")
    known = _known_parameters(flags, on_cpu=on_cpu)
    parameters = Parameters(**{**vars(usual), **({} if jitter is None else {"jitter": jitter}), **known})
    extras = {
        "request": flags.request_us / 1e6,
        "node_input": flags.node_input or math.inf,
        "storage_input": flags.storage_input or math.inf,
    }
    question = Question(
        _workload(flags, first),
        site,
        parameters,
        extras,
        _links(flags, given, site),
        given,
        flags.critical_batch or (first and first.noise_scale) or math.inf,
        on_cpu=on_cpu,
        has_jitter=jitter is not None,
    )
    return _calibrated(question, runs, known) if len(runs) > 1 else question


def _known_parameters(flags: Namespace, *, on_cpu: bool) -> dict[str, float]:
    known = {}
    if flags.contention is not None or on_cpu:
        # Ranks on CPUs reduce with the cores that backward would use.
        known |= dict.fromkeys(("contention", "tcp_contention"), 1.0 if flags.contention is None else flags.contention)
    if flags.crowding is not None:
        known["crowding"] = flags.crowding - 1
    if flags.jitter is not None:
        known["jitter"] = flags.jitter
    return known


def _calibrated(question: Question, runs: list[MeasuredRun], known: dict[str, float]) -> Question:
    """Return the question with parameters that agree with the runs."""
    measured = [(run.num_ranks, runs[0].step_seconds / run.step_seconds) for run in runs[1:]]
    parameters = calibrated(
        vars(question.parameters),
        [
            (lambda found, number=number: question.efficiency(found, number), efficiency)
            for number, efficiency in measured
        ],
        known=known,
        bounds=CPU_BOUNDS if question.on_cpu else BOUNDS,
    )
    has_jitter = "jitter" in known
    return replace(question, parameters=parameters, calibrated_ranks=runs[-1].num_ranks, has_jitter=has_jitter)


def _read_runs(paths: Collection[Path]) -> list[MeasuredRun]:
    """Return runs by their number of ranks. Raises UserError if they differ in more than that."""
    runs = sorted((read_run(path) for path in paths), key=lambda run: run.num_ranks)
    for before, after in zip(runs, runs[1:], strict=False):
        if before.num_ranks == after.num_ranks:
            raise UserError(f"expected runs of different numbers of ranks, received two of {after.num_ranks}; drop one")
        for what, name in (("samples a rank", "batch_size"), ("parameters", "num_parameters"), ("device", "device")):
            one, other = getattr(before, name), getattr(after, name)
            if one != other:
                raise UserError(
                    f"expected runs that differ in their ranks alone, received {what} {one} on {before.num_ranks} and "
                    f"{other} on {after.num_ranks} ranks; train them alike"
                )
    return runs


def _workload(flags: Namespace, run: MeasuredRun | None) -> Workload:
    step_ms = 1000 * run.step_seconds if run else flags.step_ms
    if flags.optimizer_ms >= step_ms:
        raise UserError(
            f"expected --optimizer-ms below the {step_ms:.4g} ms of a step, received {flags.optimizer_ms:g}; it is "
            "part of the step"
        )
    return Workload(
        _network(flags, run),
        run.batch_size if run else flags.batch_size,
        step_ms / 1000,
        flags.backward_share,
        passes=flags.accumulate_steps,
        optimizer_seconds=flags.optimizer_ms / 1000,
        baseline_ranks=run.num_ranks if run else flags.baseline_ranks,
    )


def _network(flags: Namespace, run: MeasuredRun | None) -> Network:
    if flags.parameters:
        return uniform(flags.parameters)
    if flags.model:
        return read_model(flags.model, flags.framework, flags.input_shape, flags.classes)
    known = known_networks()
    if run and flags.network is None:
        same = [network for network in known.values() if network.num_parameters == run.num_parameters]
        return same[0] if same else uniform(run.num_parameters)
    name = flags.network or "resnet50"
    if name in known:
        return known[name]
    if not name.endswith((".yaml", ".yml")):
        raise UserError(
            f"expected --network to be one of {', '.join(known)} or a YAML file of layers, received {quote(name)}; "
            "name one"
        )
    return read_network(Path(name))


def _site(flags: Namespace, given: frozenset[str], runs: list[MeasuredRun]) -> Site:
    """Return the site; a run's strategy says how gradients are exchanged unless flags do."""
    strategy = runs[0].strategy if runs and not given & _PATTERN_FLAGS else ""
    is_sharded = flags.sharded or strategy == "fsdp"
    return Site(
        flags.ranks_per_node or max((run.ranks_per_node or 0 for run in runs), default=0) or RANKS_PER_NODE,
        flags.intra_gbit,
        flags.inter_gbit,
        flags.link,
        flags.intra_us,
        flags.inter_us,
        algorithm=flags.algorithm,
        num_servers=flags.servers,
        fusion=_fusion(flags, strategy, on_cpu=bool(runs and runs[0].device == "cpu")),
        overlap=not flags.no_overlap,
        wire_bytes=4 if flags.compression == "none" else 2,
        gather_bytes=int(flags.gather_bits) // 8 if is_sharded else 0,
    )


def _fusion(flags: Namespace, strategy: str, *, on_cpu: bool) -> Fusion:
    if flags.buckets or strategy == "ddp":
        return DDP_BUCKETS if flags.fusion_mib is None else replace(DDP_BUCKETS, threshold=flags.fusion_mib * MIB)
    if on_cpu and strategy:
        return Fusion(FUSION_THRESHOLD_ON_CPU, 0.0)
    return Fusion((128 if flags.fusion_mib is None else flags.fusion_mib) * MIB, flags.cycle_ms / 1000)


def _links(flags: Namespace, given: frozenset[str], site: Site) -> tuple[Link | None, Link | None]:
    """Return the links that results of `allstep collectives` have measured, in a host and between hosts."""
    found: list[Link | None] = [None, None]
    for path in flags.collectives or ():
        num_ranks, link = read_link(path)
        is_wide = num_ranks > site.ranks_per_node
        prefix = "inter" if is_wide else "intra"
        for name in (f"{prefix}_gbit", f"{prefix}_us"):
            if name in given:
                raise UserError(
                    f"expected {flag_of(name)} or --collectives of {num_ranks} ranks, received both; leave one out"
                )
        if found[is_wide]:
            where = "several hosts" if is_wide else "one host"
            raise UserError(f"expected one file of {where} in --collectives, received two; leave {path} out")
        found[is_wide] = link
    return found[0], found[1]
