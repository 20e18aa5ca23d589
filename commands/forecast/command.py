"""Forecast step time, efficiency and time to accuracy on 1 to 100,000 ranks, before the machine is bought.

    allstep forecast --network resnet50 --batch-size 32 --step-ms 200 --ranks-per-node 8 --inter-gbit 100
    allstep forecast --run runs/one-rank --ranks 1,2,4,8
    allstep forecast --validate [--measured DIR --collectives FILE,...] [--output FILE]
    allstep forecast --loss-of-parameters 175e9

The inputs are the step time of one rank, the parameters per layer, and the latency and bandwidth of the links in a node
and between nodes (`allstep collectives` measures them). The batch per rank is the same for any number of ranks. A row
shows what costs most at that size, and the change that would help most. `closed` is the step time without overlap and
fusion: computing, then one all-reduce of everything, 2(N-1)/N S/B and latency for a ring. A second table shows the
upper limit of what heartbeats and replica checks add, if that is over 1 % of a step.

`--run` takes step time, parameters and jitter from a run, and the critical batch if the run has measured the gradient
noise scale (with --accumulate-steps). `--validate` forecasts published tables and, if given, your own compare results,
and prints the errors; its exit status is 1 if an efficiency is off by more than 5 points. Your own results need a file
of `allstep collectives` for each number of ranks.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.forecast import measured_runs
from allstep.commands.forecast.accuracy import epochs_needed, loss_by_parameters
from allstep.commands.forecast.allreduce import ALGORITHMS
from allstep.commands.forecast.control_plane import ControlPlane, control_plane
from allstep.commands.forecast.forecast import BEST, NOTICED, Machine, Workload, bottleneck, forecast, what_helps
from allstep.commands.forecast.links import Cluster, Link
from allstep.commands.forecast.networks import Network, known_networks, read_network, uniform
from allstep.commands.forecast.records import ForecastRow, ForecastsResult, ValidationResult
from allstep.commands.forecast.simulation import MIB, Fusion
from allstep.commands.forecast.validation import LARGEST_ERROR, PUBLISHED, Checked, check
from allstep.commands.shared.records import files
from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import (
    MAX_COUNT,
    Parser,
    listed,
    nonempty_path,
    nonempty_text,
    number,
    one_of,
    whole,
)

GIGABIT = 1e9 / 8
NUM_LAYERS = 50
"""Number of layers assumed for a network of which only the number of parameters is known."""
JITTER = 0.02
"""Jitter of GPUs in a data center (published/), used if none was measured."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the forecast, the validation or the scaling law."""
    flags = _parser().parse_args(argv)
    if flags.loss_of_parameters:
        print(f"loss {loss_by_parameters(flags.loss_of_parameters):.4f} nats a token (Kaplan et al. 2020)")
    elif flags.validate:
        _validate(flags, files.command("forecast", argv))
    else:
        _forecast(flags, files.command("forecast", argv))


def _parser() -> Parser:
    # Limits far beyond any machine, with products that are still finite.
    some, positive, part = number(0, 1e18), number(0, 1e18, above=True), number(0, 1)
    parser = Parser("allstep forecast", __doc__)
    what = parser.add_argument_group("what one rank does")
    what.add_argument(
        "--network", type=nonempty_text, metavar="NAME", help="a known network (resnet50), or a YAML file of layers"
    )
    what.add_argument("--parameters", type=whole(1, 10**15), metavar="N", help="or parameters, in equal layers")
    what.add_argument(
        "--batch-size", type=whole(1, MAX_COUNT), default=32, metavar="N", help="samples per rank and step"
    )
    what.add_argument("--step-ms", type=positive, metavar="MS", help="step time of a single rank")
    what.add_argument("--run", type=nonempty_path, metavar="DIR", help="take these from a training run on one rank")
    what.add_argument("--backward-share", type=part, default=2 / 3, metavar="X", help="backward's share of a step")
    what.add_argument(
        "--jitter", type=some, metavar="X", help=f"deviation of step times over mean; default: --run's, or {JITTER:g}"
    )
    where = parser.add_argument_group("the machine")
    where.add_argument("--ranks-per-node", type=whole(1, MAX_COUNT), default=8, metavar="N")
    where.add_argument("--intra-us", type=some, default=3.4, metavar="US", help="latency of a hop in a node")
    where.add_argument("--intra-gbit", type=positive, default=800.0, metavar="GBIT/S", help="measured bandwidth")
    where.add_argument("--inter-us", type=some, default=14.0, metavar="US", help="latency of a hop between nodes")
    where.add_argument("--inter-gbit", type=positive, default=90.0, metavar="GBIT/S", help="shared by a node's ranks")
    where.add_argument(
        "--collectives",
        type=listed(nonempty_path),
        metavar="FILE,...",
        help="take the links in a node from results of allstep collectives",
    )
    where.add_argument("--contention", type=part, default=0.0, metavar="X", help="share of speed backward loses")
    where.add_argument(
        "--crowding", type=number(1, 1e18), default=1.0, metavar="X", help="step time in a full over an idle node"
    )
    where.add_argument("--node-input", type=positive, default=math.inf, metavar="N", help="samples/s of a node")
    where.add_argument("--storage-input", type=positive, default=math.inf, metavar="N", help="samples/s for all nodes")
    how = parser.add_argument_group("how gradients are all-reduced")
    how.add_argument("--algorithm", type=one_of(*ALGORITHMS, BEST), default=BEST, metavar="NAME")
    how.add_argument("--fusion-mib", type=some, default=128.0, metavar="MIB", help="fusion threshold or bucket size")
    how.add_argument("--cycle-ms", type=some, default=1.0, metavar="MS", help="HOROVOD_CYCLE_TIME")
    how.add_argument("--buckets", action="store_true", help="buckets of --fusion-mib as in DDP")
    how.add_argument("--request-us", type=some, default=0.0, metavar="US", help="rank 0's time per rank and gradient")
    how.add_argument("--compression", type=one_of("none", "fp16"), default="none", metavar="NAME")
    parser.add_argument(
        "--ranks",
        type=listed(whole(1, MAX_COUNT)),
        default=(1, 2, 4, 8, 64, 512, 4096, 10_000, 100_000),
        metavar="N,...",
    )
    goal = parser.add_argument_group("time to accuracy")
    goal.add_argument("--samples", type=whole(1, 10**15), metavar="N", help="samples in an epoch")
    goal.add_argument("--epochs", type=positive, default=90.0, metavar="X", help="epochs needed with small batches")
    goal.add_argument(
        "--critical-batch", type=positive, metavar="N", help="takes twice the epochs; default: --run's noise scale"
    )
    kept = "write the forecast, or the errors, as JSON"
    parser.add_argument("--output", type=files.output_file, metavar="FILE", help=kept)
    parser.add_argument("--validate", action="store_true", help="forecast published tables, and print the errors")
    parser.add_argument("--measured", type=nonempty_path, metavar="DIR", help="with --validate: own results")
    parser.add_argument("--loss-of-parameters", type=positive, metavar="N", help="print L(N) of a language model")
    return parser


def _forecast(flags: Namespace, command: str) -> None:
    run = measured_runs.read_run(flags.run) if flags.run else None
    workload, machine = _workload(flags, run), _machine(flags)
    critical_batch = flags.critical_batch or (run and run.noise_scale) or math.inf
    rows, controls = [], {}
    print(
        f"{workload.network.name}: {workload.network.num_parameters:,} parameters, "
        f"{workload.batch_size} samples a rank, {1000 * workload.step_seconds:.4g} ms on one rank, "
        f"jitter {workload.jitter:.1%}"
        f"{f', critical batch {critical_batch:.4g} samples' if critical_batch < math.inf else ''}\n"
    )
    width = 14
    accuracy = f" {'to accuracy':>12}" if flags.samples else ""
    head = f"{'ranks':>7} {'step ms':>9} {'closed ms':>9} {'efficiency':>10} {'samples/s':>11}{accuracy}"
    print(f"{head}  costs most; helps most")
    for num_ranks in flags.ranks:
        found = forecast(workload, machine, num_ranks)
        controls[num_ranks] = control = control_plane(
            workload, machine.cluster, num_ranks, step_seconds=found.total, samples=flags.samples
        )
        cost, share = bottleneck(workload, machine, num_ranks)
        if control.share > max(NOTICED, share):
            cost, share = f"control plane ({control.costliest})", control.share / (1 + control.share)
        helps = what_helps(workload, machine, num_ranks)
        seconds = None
        if flags.samples:
            epochs = epochs_needed(flags.epochs, num_ranks * workload.batch_size, critical_batch)
            seconds = epochs * flags.samples / found.images_per_second
        advice = f"; {helps[0]}: {helps[1]:.1%}" if helps else ""
        print(
            f"{num_ranks:>7} {1000 * found.total:>9.4g} {1000 * found.closed_form:>9.4g} {found.efficiency:>10.1%} "
            f"{found.images_per_second:>11,.0f}{f' {_duration(seconds):>12}' if seconds else ''}  "
            f"{f'{cost} {share:.0%}' if share else cost:{width}}{advice}"
        )
        limits = {"bottleneck": cost, "bottleneck_share": share, "helps": helps, "control_plane": control}
        rows.append(ForecastRow(**vars(found), **limits, seconds_to_accuracy=seconds))
    _print_control_planes({num_ranks: control for num_ranks, control in controls.items() if control.share > NOTICED})
    if flags.output:
        files.write_output(flags.output, ForecastsResult(command, tuple(rows)))


def _print_control_planes(found: dict[int, ControlPlane]) -> None:
    """Print a row for each number of ranks."""
    if not found:
        return
    print("\nControl plane: upper limit of what is added to a step, if rank 0 has no core to spare\n")
    print(f"{'ranks':>7} {'beats':>9} {'replica check':>22} {'stop agreed':>11} {'state sent':>11} {'connections':>11}")
    for num_ranks, control in found.items():
        share_of_step = f"{control.replica_check_share:.1%}, " if control.replica_check_share else ""
        checked = f"{share_of_step}{control.replica_check:.2g} s an epoch"
        print(
            f"{num_ranks:>7} {control.beats:>9.1%} {checked:>22} {control.stop:>9.1f} s {control.broadcast:>9.2g} s "
            f"{control.num_connections:>11,}"
        )


def _workload(flags: Namespace, run: measured_runs.MeasuredRun | None) -> Workload:
    if not (run or flags.step_ms):
        raise UserError("expected the step time of one rank, received none; give --step-ms, or --run of a measured run")
    if flags.parameters:
        network = uniform(flags.parameters, NUM_LAYERS)
    elif run and flags.network is None:
        known = [network for network in known_networks().values() if network.num_parameters == run.num_parameters]
        network = known[0] if known else uniform(run.num_parameters, NUM_LAYERS)
    else:
        network = _network(flags.network or "resnet50")
    given = (flags.jitter, run and run.jitter, JITTER)
    return Workload(
        network,
        run.batch_size if run else flags.batch_size,
        run.step_seconds if run else flags.step_ms / 1000,
        flags.backward_share,
        next(jitter for jitter in given if jitter is not None),
    )


def _network(name: str) -> Network:
    known = known_networks()
    if name in known:
        return known[name]
    if not name.endswith((".yaml", ".yml")):
        raise UserError(
            f"expected --network to be one of {', '.join(known)} or a YAML file of layers, received {quote(name)}; "
            "name one"
        )
    return read_network(Path(name))


def _machine(flags: Namespace) -> Machine:
    intra = Link(flags.intra_us / 1e6, flags.intra_gbit * GIGABIT)
    if flags.collectives:
        intra = measured_runs.read_link(flags.collectives[0])
    return Machine(
        Cluster(flags.ranks_per_node, intra, Link(flags.inter_us / 1e6, flags.inter_gbit * GIGABIT)),
        algorithm=flags.algorithm,
        fusion=Fusion(flags.fusion_mib * MIB, flags.cycle_ms / 1000, flags.buckets),
        wire_bytes=2 if flags.compression == "fp16" else 4,
        contention=flags.contention,
        request=flags.request_us / 1e6,
        crowding=flags.crowding,
        node_input=flags.node_input,
        storage_input=flags.storage_input,
    )


def _validate(flags: Namespace, command: str) -> None:
    rows, notes = [row for path in sorted(PUBLISHED.glob("*.yaml")) for row in check(path)], ()
    if flags.measured:
        if not flags.collectives:
            raise UserError("expected --collectives with --measured, received none; run allstep collectives")
        notes = measured_runs.NOTES
        rows += measured_runs.check_compare(flags.measured, flags.collectives)
    print(f"{'':28} {'network':16} {'ranks':>6} {'measured':>8} {'forecast':>8} {'error':>7}  within 5 points")
    for row in rows:
        print(_line(row))
    missed = [row for row in rows if not row.within]
    true = [row for row in rows if not row.estimated]
    largest = max(abs(row.error) for row in true)
    print(
        f"\n{len(rows) - len(missed)} of {len(rows)} within {100 * LARGEST_ERROR:g} points; largest error of the "
        f"{len(true)} rows from which nothing was estimated: {100 * largest:.1f} points"
    )
    for note in notes:
        print(note)
    if flags.output:
        files.write_output(flags.output, ValidationResult(command, LARGEST_ERROR, tuple(rows), notes))
    if missed:
        sys.exit(1)


def _line(row: Checked) -> str:
    verdict = "yes" if row.within else "NO"
    note = f" ({row.estimated} estimated here)" if row.estimated else ""
    baseline = f"/{row.baseline_ranks}" if row.baseline_ranks > 1 else ""
    return (
        f"{row.title.partition(' (')[0][:20]:20} {row.system[:7]:7} {row.network:16} {f'{row.num_ranks}{baseline}':>6} "
        f"{row.measured:>8.1%} {row.forecast:>8.1%} {100 * row.error:>+7.1f}  {verdict}{note}"
    )


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
