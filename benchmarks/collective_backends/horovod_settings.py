"""Which fusion threshold and cycle time a network should have under Horovod, from what its all-reduces cost here.

Every candidate's step is simulated (`prediction.simulation`) with the measured cost of a message and of a copy into and
out of the fusion buffer; the fastest wins, and of equal ones the one that changes least.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from allstep.benchmarks.harness.measure import epoch_rates, interleaved, job, median_ratio, run
from allstep.benchmarks.prediction.forecast import gradients
from allstep.benchmarks.prediction.networks import known_networks
from allstep.benchmarks.prediction.simulation import MIB, Fusion, simulate
from allstep.common.process.errors import UserError
from allstep.common.strategies import FUSION_THRESHOLD_ON_CPU

HOROVODS = Fusion(128 * MIB, 0.001)
"""The settings of Horovod 0.28.1."""
DEFAULT = Fusion(FUSION_THRESHOLD_ON_CPU, HOROVODS.cycle)
"""Those of the trainers on CPUs."""
THRESHOLDS = (0, MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
CYCLES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
_NOTICED = 0.01
"""Share of a step below which a candidate is no better than the default."""
_BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Costs:
    """What a message of Horovod's costs: latency + bytes / bandwidth, and copies at `copy_bandwidth`."""

    latency: float
    bandwidth: float
    copy_bandwidth: float
    num_ranks: int


def costs_of(rows: Sequence[dict], num_ranks: int) -> Costs | None:
    """Costs from the rows of `allstep collectives`; None where Horovod or memcpy was not measured at two sizes.

    Of several frameworks, those of the one that answers fastest: a call in TensorFlow also waits for the next cycle.
    """
    horovod = [row for row in rows if row["backend"].startswith("horovod-") and row["collective"] == "all-reduce"]
    copies = [row for row in rows if row["backend"] == "memcpy"]
    if len({row["bytes"] for row in horovod}) < 2 or not copies:
        return None
    fastest = min(horovod, key=lambda row: (row["bytes"], row["seconds"]["average"]))["backend"]
    ours = [row for row in horovod if row["backend"] == fastest]
    smallest, largest = (choose(ours, key=lambda row: row["bytes"]) for choose in (min, max))
    least, most = smallest["seconds"]["average"], largest["seconds"]["average"]
    bandwidth = (largest["bytes"] - smallest["bytes"]) / max(most - least, 1e-9)
    copy = max(copies, key=lambda row: row["bytes"])["algorithm_bandwidth"]
    return Costs(least, bandwidth, copy, num_ranks)


def recommend(costs: Costs, network: str, step_ms: float) -> dict:
    """The fastest of the candidates for a network, with the simulated step times.

    Raises:
        UserError: the network is not known.
    """
    known = known_networks()
    if network not in known:
        raise UserError(f"expected --network to be one of {', '.join(known)}, received {network}; name one")
    backward = _BACKWARD_SHARE * step_ms / 1000
    found = gradients(known[network], backward, 4)

    def seconds(fusion: Fusion) -> float:
        """Of a step; ranks on CPUs reduce with the cores that backward would use."""
        by_itself = {gradient.num_bytes for gradient in found}

        def all_reduce(num_bytes: float) -> float:
            copied = 0 if num_bytes in by_itself else 2 * num_bytes / costs.copy_bandwidth
            return costs.latency + num_bytes / costs.bandwidth + copied

        return simulate(step_ms / 1000 - backward, found, all_reduce, fusion=fusion, contention=1.0).total

    candidates = [Fusion(threshold, cycle) for threshold in THRESHOLDS for cycle in CYCLES]
    best = min(candidates, key=seconds)
    if seconds(best) > (1 - _NOTICED) * seconds(DEFAULT):
        best = DEFAULT
    return {
        "network": network,
        "step_ms": step_ms,
        "threshold": best.threshold,
        "cycle_ms": 1000 * best.cycle,
        "simulated_seconds": seconds(best),
        "simulated_seconds_by_default": seconds(DEFAULT),
        "simulated_seconds_without_fusion": seconds(Fusion(0, DEFAULT.cycle)),
        "latency": costs.latency,
        "bandwidth": costs.bandwidth,
    }


def variables(recommendation: dict) -> dict[str, str]:
    """The recommendation as Horovod reads it."""
    return {
        "HOROVOD_FUSION_THRESHOLD": f"{recommendation['threshold']:.0f}",
        "HOROVOD_CYCLE_TIME": f"{recommendation['cycle_ms']:g}",
    }


def told(recommendation: dict) -> str:
    """The recommendation in a line or two."""
    settings = " ".join(f"{name}={value}" for name, value in variables(recommendation).items())
    default, best = recommendation["simulated_seconds_by_default"], recommendation["simulated_seconds"]
    return (
        f"recommended for {recommendation['network']} at {recommendation['step_ms']:g} ms a step: {settings}\n"
        f"  simulated: {default / best:.3f} times as fast as by default, "
        f"{recommendation['simulated_seconds_without_fusion'] / best:.3f} times as fast as without fusion"
    )


def try_out(recommendation: dict, num_ranks: int, num_rounds: int) -> dict:
    """Train with several settings in turn; print the ratios, and return them with settings and rates.

    `default` is what the trainers do where nothing is set: what was before.
    """
    choices = {
        "default": {},
        "Horovod's own": variables({"threshold": HOROVODS.threshold, "cycle_ms": 1000 * HOROVODS.cycle}),
        "recommended": variables(recommendation),
        "without fusion": {"HOROVOD_FUSION_THRESHOLD": "0"},
    }
    network = recommendation["network"]
    trainings = {name: partial(_rate, settings, network, num_ranks) for name, settings in choices.items()}
    rates = interleaved(trainings, num_rounds)
    ours = rates.pop("recommended")
    ratios = {f"recommended / {name}": median_ratio(ours, others) for name, others in rates.items()}
    for what, ratio in ratios.items():
        print(f"images/s, {what}: {ratio:.3f}")
    return {"settings": choices, "images_per_second": {"recommended": ours, **rates}, "ratios": ratios}


def _rate(settings: dict[str, str], network: str, num_ranks: int) -> float:
    """Images per second of the PyTorch trainer under Horovod with these settings."""
    with tempfile.TemporaryDirectory(prefix="allstep-tune-") as directory:
        output = Path(directory, "run")
        flags = ["--dataset", "synthetic", "--synthetic-samples", 64 * 20 * num_ranks, "--model", network]
        flags += ["--batch-size", 64, "--epochs", 4, "--output-dir", output]
        given = [f"{name}={value}" for name, value in settings.items()]
        run(["env", *given, *job("allstep.pytorch.train", *flags, num_ranks=num_ranks)])
        return statistics.median(epoch_rates(output))
