"""Forecast step time, efficiency and time to accuracy on 1 to 100,000 ranks, before the machine is bought.

    allstep forecast --network resnet50 --batch-size 32 --step-ms 200 --ranks-per-node 8 --inter-gbit 100 --link rdma
    allstep forecast --model my_model.py:build --input-shape 224,224,3 --step-ms 80
    allstep forecast --run runs/one-rank --run runs/two-ranks --ranks 1,2,4,8
    allstep forecast --validate [--measured DIR --collectives FILE,...] [--output FILE]
    allstep forecast --loss-of-parameters 175e9

The inputs are the step time of one rank, the layers of the network, and the nominal bandwidth and kind of the links.
The batch per rank is the same for any number of ranks. `10-90%` is the range in which 80 % of measurements lie on
machines that were not fitted. What no user knows (contention, crowded hosts, the share of nominal bandwidth that is
reached, jitter) is fitted to published measurements: docs/forecast.md. A row shows what costs most at that size, and
the change that would help most; what is only assumed is never named. `closed` is the step time without overlap and
fusion. Efficiency contains the upper limit of what heartbeats and replica checks add; a second table shows them if that
is over 1 % of a step.

Several `--run` of 1, 2, 4 ranks, or of one and two hosts, calibrate the forecast on your machines, which narrows the
range; `--collectives` takes measured links. `--run` also takes jitter, and the critical batch if the run has measured
the gradient noise scale (with --accumulate-steps). `--validate` forecasts published tables and, if given, your own
compare results, and prints the errors; its exit status is 1 if fewer than 75 % of the published efficiencies are in
their range, or one of yours is off by more than 5 points.
"""

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from allstep.commands.forecast import measured_runs, section
from allstep.commands.forecast.allreduce import Link
from allstep.commands.forecast.causes import NOTICED, UNKNOWN, bottleneck, what_helps
from allstep.commands.forecast.control_plane import control_plane
from allstep.commands.forecast.flags import parse
from allstep.commands.forecast.forecast import forecast
from allstep.commands.forecast.parameters import BOUNDS
from allstep.commands.forecast.question import Question, read_question
from allstep.commands.forecast.site import KINDS
from allstep.commands.forecast.validation import LARGEST_ERROR, MIN_COVERAGE, check, published_points
from allstep.commands.shared.page.document import print_table
from allstep.commands.shared.records import files
from allstep.common.base.errors import print_line, printable

_CALIBRATED = "as in the runs"
"""Name of a cost that comes from calibrated values, which no run separates."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the forecast, the validation or the scaling law."""
    flags, given = parse("allstep forecast", __doc__, None if argv is None else list(argv))
    if flags.loss_of_parameters:
        print(f"loss {loss_by_parameters(flags.loss_of_parameters):.4f} nats a token (Kaplan et al. 2020)")
    elif flags.validate:
        _validate(flags, files.command("forecast", argv))
    else:
        _forecast(flags, read_question(flags, given), files.command("forecast", argv))


def _forecast(flags: Namespace, question: Question, command: str) -> None:
    rows = [_row(flags, question, num_ranks) for num_ranks in flags.ranks]
    print_line("\n".join([*map(printable, _assumptions(flags, question)), ""]))
    print_table(section.table_of(rows))
    if (control_planes := section.control_table(rows)).rows:
        print_table(control_planes)
    if flags.output:
        files.write_output(flags.output, section.ForecastsResult(command, tuple(rows)))


def _row(flags: Namespace, question: Question, num_ranks: int) -> section.ForecastRow:
    """Return the forecast for a number of ranks, with its range and what limits it."""
    workload, machine = question.workload, question.machine
    found = forecast(workload, machine, num_ranks)
    low, high = question.limits(found)
    known = question.known_causes(num_ranks)
    cost, share = bottleneck(workload, machine, found, known)
    if cost == UNKNOWN and question.calibrated_ranks:
        cost = _CALIBRATED
    helps, control = what_helps(workload, machine, found, known), None
    if not flags.no_control_plane:
        control = control_plane(workload, machine.cluster, num_ranks, step_seconds=found.total, samples=flags.samples)
        added = 1 + control.share
        if control.share > max(NOTICED, share):
            cost, share = f"control plane ({control.costliest})", control.share / added
        speed, efficiency = found.images_per_second / added, found.efficiency / added
        found = replace(found, total=found.total * added, efficiency=efficiency, images_per_second=speed)
        low /= added
        helps = (helps[0], helps[1] / added) if helps else None
    seconds = None
    if flags.samples:
        epochs = epochs_needed(flags.epochs, num_ranks * workload.batch_size, question.critical_batch)
        seconds = epochs * flags.samples / found.images_per_second
    limits = {"bottleneck": cost, "bottleneck_share": share, "helps": helps, "control_plane": control}
    return section.ForecastRow(**vars(found), **limits, seconds_to_accuracy=seconds, low=low, high=high)


def _assumptions(flags: Namespace, question: Question) -> list[str]:
    """Return lines that say what the forecast is made from, and what of it is assumed."""
    workload, site, parameters = question.workload, question.site, question.parameters
    network = workload.network
    baseline = f"{workload.baseline_ranks} ranks" if workload.baseline_ranks > 1 else "one rank"
    critical = question.critical_batch
    jitter = f"jitter {workload.jitter:.1%}{'' if question.has_jitter else ' (fitted)'}"
    lines = [
        f"{network.name}: {network.num_parameters:,} parameters, {workload.batch_size} samples a rank, "
        f"{1000 * workload.step_seconds:.4g} ms on {baseline}, {jitter}"
        f"{f', critical batch {critical:.4g} samples' if critical < float('inf') else ''}"
    ]
    intra, inter = question.links
    names = {"nvlink": "NVLink", "pcie": "PCIe", "rdma": "RDMA", "tcp": "TCP"}
    given = question.given
    within = f"{site.intra_gbit:g} Gbit/s inside ({names[site.within]}{'' if 'intra_gbit' in given else ', assumed'})"
    is_assumed = not given & {"inter_gbit", "link"}
    between = f"{site.inter_gbit:g} Gbit/s between hosts ({names[site.between]}{', assumed' if is_assumed else ''})"
    links = f"{_link(intra, within, 'inside')}, {_link(inter, between, 'between hosts')}"
    lines.append(f"{site.ranks_per_node} ranks a host, {links}")
    how = f"calibrated on runs of up to {question.calibrated_ranks} ranks" if question.calibrated_ranks else "fitted"
    values = ", ".join(f"{name} {getattr(parameters, name):.3g}" for name in BOUNDS)
    lines.append(f"parameters, {how}: {values}")
    if question.on_cpu:
        lines.append("the ranks compute on CPUs, to which no default was fitted: ranges are twice as wide")
    if question.is_far([number for number in flags.ranks if number > 1]):
        lines.append("ranges are wider where ranks, links or the pattern are beyond what was fitted (docs/forecast.md)")
    return lines


def _link(measured: Link | None, nominal: str, where: str) -> str:
    return f"{measured.bandwidth * 8e-9:.3g} Gbit/s {where} (measured)" if measured else nominal


def _validate(flags: Namespace, command: str) -> None:
    published = [check(point) for point in published_points()]
    own, notes = [], ()
    if flags.measured:
        notes = measured_runs.NOTES
        own = measured_runs.check_compare(flags.measured, flags.collectives)
    print_table(section.checked_table((*published, *own)))
    coverage = statistics.fmean(row.within for row in published)
    print(
        f"\nPublished, fitted to these rows (docs/forecast.md has errors on unseen ones): {coverage:.0%} in the range"
    )
    for kind in KINDS:
        errors = [100 * row.error for row in published if row.link == kind]
        sizes = sorted(map(abs, errors))
        print(
            f"{kind:8} {len(errors):>3} rows: median error {statistics.median(sizes):.1f} points, largest "
            f"{sizes[-1]:.1f}, signed mean {statistics.fmean(errors):+.1f}"
        )
    if own:
        print(f"{sum(row.within for row in own)} of {len(own)} own rows within {100 * LARGEST_ERROR:g} points")
    for note in notes:
        print(note)
    if flags.output:
        files.write_output(flags.output, section.ValidationResult(command, LARGEST_ERROR, (*published, *own), notes))
    if coverage < MIN_COVERAGE or not all(row.within for row in own):
        sys.exit(1)


KAPLAN_PARAMETERS, KAPLAN_EXPONENT = 8.8e13, 0.076


def epochs_needed(epochs: float, global_batch_size: int, critical_batch_size: float = math.inf) -> float:
    """Return the passes over the data that a target accuracy takes with a global batch.

    E = E_min (1 + B / B_crit) (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, equation 2.11, with
    E proportional to the samples): below the critical batch a pass is worth the same with any batch. `epochs` are the
    passes needed with a small batch; at `critical_batch_size` samples, twice as many are needed.
    """
    return epochs * (1 + global_batch_size / critical_batch_size)


def loss_by_parameters(num_parameters: float) -> float:
    """Return the test loss, in nats per token, of a language model with ample data and compute.

    L(N) = (N_c / N)^0.076 with N_c = 8.8e13, embeddings not counted (Kaplan et al. 2020, equation 1.1).
    """
    return (KAPLAN_PARAMETERS / num_parameters) ** KAPLAN_EXPONENT
