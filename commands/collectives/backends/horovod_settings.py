"""Choice of Horovod's fusion threshold and cycle time for a network, from the measured cost of all-reduces.

Every candidate's step is simulated (`forecast.simulation`) with the measured cost of a message and of a copy into and
out of the fusion buffer. The fastest candidate wins, unless it is hardly faster than the default.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from allstep.commands.collectives.backends import BACKENDS
from allstep.commands.forecast.forecast import gradients
from allstep.commands.forecast.networks import known_networks
from allstep.commands.forecast.simulation import MIB, Fusion, simulate
from allstep.commands.shared.jobs import scratch_folder
from allstep.commands.shared.measure import epoch_rates, interleaved, job, median_ratio, run
from allstep.commands.shared.records.collectives import Recommendation, Row, Tuning
from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import FUSION_THRESHOLD_ON_CPU

HOROVODS = Fusion(128 * MIB, 0.001)
"""Default settings of Horovod 0.28.1."""
DEFAULT = Fusion(FUSION_THRESHOLD_ON_CPU, HOROVODS.cycle)
"""Settings of the trainers on CPUs."""
THRESHOLDS = (0, MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
CYCLES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
_NOTICED = 0.01
"""Share of a step that a candidate must save to be recommended over the default."""
_BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Costs:
    """Cost model of Horovod's all-reduce: latency + bytes / bandwidth, and copies at `copy_bandwidth`."""

    latency: float
    bandwidth: float
    copy_bandwidth: float


def costs_of(rows: Sequence[Row]) -> Costs | None:
    """Return the costs from rows of `allstep collectives`; None without memcpy or without two sizes of Horovod.

    Of two frameworks, the costs are those of the faster one: a call in TensorFlow also waits for the next cycle.
    """
    horovod = [row for row in rows if BACKENDS[row.backend].is_horovod and row.collective == "all-reduce"]
    copies = [row for row in rows if row.backend == "memcpy"]
    if len({row.bytes for row in horovod}) < 2 or not copies:
        return None
    fastest = min(horovod, key=lambda row: (row.bytes, row.seconds.average)).backend
    ours = sorted((row for row in horovod if row.backend == fastest), key=attrgetter("bytes"))
    minimum, maximum = ours[0].seconds.average, ours[-1].seconds.average
    bandwidth = (ours[-1].bytes - ours[0].bytes) / max(maximum - minimum, 1e-9)
    return Costs(minimum, bandwidth, max(copies, key=attrgetter("bytes")).algorithm_bandwidth)


def recommend(costs: Costs, network: str, step_ms: float) -> Recommendation:
    """Return the fastest candidate for a network, with simulated step times.

    Raises UserError if the network is not known.
    """
    known = known_networks()
    if network not in known:
        raise UserError(f"expected --network to be one of {', '.join(known)}, received {network}; name one")
    backward = _BACKWARD_SHARE * step_ms / 1000
    found = gradients(known[network], backward, 4)

    def seconds(fusion: Fusion) -> float:
        """Return the simulated time of a step; ranks on CPUs reduce with the cores that backward would use."""
        by_itself = {gradient.num_bytes for gradient in found}

        def all_reduce(num_bytes: float) -> float:
            copied = 0 if num_bytes in by_itself else 2 * num_bytes / costs.copy_bandwidth
            return costs.latency + num_bytes / costs.bandwidth + copied

        return simulate(step_ms / 1000 - backward, found, all_reduce, fusion=fusion, contention=1.0).total

    candidates = [Fusion(threshold, cycle) for threshold in THRESHOLDS for cycle in CYCLES]
    best = min(candidates, key=seconds)
    if seconds(best) > (1 - _NOTICED) * seconds(DEFAULT):
        best = DEFAULT
    return Recommendation(
        network=network,
        step_ms=step_ms,
        threshold=best.threshold,
        cycle_ms=1000 * best.cycle,
        simulated_seconds=seconds(best),
        simulated_seconds_by_default=seconds(DEFAULT),
        simulated_seconds_without_fusion=seconds(Fusion(0, DEFAULT.cycle)),
        latency=costs.latency,
        bandwidth=costs.bandwidth,
    )


def variables(threshold: float, cycle_ms: float) -> dict[str, str]:
    """Return a fusion threshold and a cycle time as Horovod's environment variables."""
    return {"HOROVOD_FUSION_THRESHOLD": f"{threshold:.0f}", "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}"}


def sentence(found: Recommendation) -> str:
    """Return the recommendation as text of two lines."""
    settings = " ".join(f"{name}={value}" for name, value in variables(found.threshold, found.cycle_ms).items())
    by_default = found.simulated_seconds_by_default / found.simulated_seconds
    without_fusion = found.simulated_seconds_without_fusion / found.simulated_seconds
    return (
        f"recommended for {found.network} at {found.step_ms:g} ms a step: {settings}\n"
        f"  simulated: {by_default:.3f} times as fast as by default, "
        f"{without_fusion:.3f} times as fast as without fusion"
    )


def try_out(recommendation: Recommendation, num_ranks: int, num_rounds: int) -> Tuning:
    """Train with several settings in turn, print the ratios, and return them with settings and rates.

    `default` is what the trainers do if nothing is set.
    """
    choices = {
        "default": {},
        "Horovod's own": variables(HOROVODS.threshold, 1000 * HOROVODS.cycle),
        "recommended": variables(recommendation.threshold, recommendation.cycle_ms),
        "without fusion": {"HOROVOD_FUSION_THRESHOLD": "0"},
    }
    trainings = {
        name: partial(_rate, settings, recommendation.network, num_ranks) for name, settings in choices.items()
    }
    rates = interleaved(trainings, num_rounds)
    ours = rates.pop("recommended")
    ratios = {f"recommended / {name}": median_ratio(ours, others) for name, others in rates.items()}
    for what, ratio in ratios.items():
        print(f"images/s, {what}: {ratio:.3f}")
    rounds = {"recommended": ours, **rates}
    return Tuning(choices, {name: tuple(samples) for name, samples in rounds.items()}, ratios)


def _rate(settings: dict[str, str], network: str, num_ranks: int) -> float:
    """Return the images per second of the PyTorch trainer under Horovod with these settings."""
    with scratch_folder("collectives") as directory:
        output = directory / "run"
        flags = ["--dataset", "synthetic", "--synthetic-samples", 64 * 20 * num_ranks, "--model", network]
        flags += ["--batch-size", 64, "--epochs", 4, "--output-dir", output]
        given = [f"{name}={value}" for name, value in settings.items()]
        run(["env", *given, *job("allstep.pytorch.train", *flags, num_ranks=num_ranks)])
        return statistics.median(epoch_rates(output))
