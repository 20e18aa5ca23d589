"""Flags of `allstep forecast`, and combinations of them that would have no effect, each refused in a line."""

import argparse
from argparse import Namespace

from allstep.commands.forecast.allreduce import ALGORITHMS
from allstep.commands.forecast.forecast import BEST
from allstep.commands.forecast.site import RDMA, TCP
from allstep.commands.shared.records import files
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

DEFAULTS = {
    "batch_size": 32,
    "baseline_ranks": 1,
    "backward_share": 2 / 3,
    "optimizer_ms": 0.0,
    "accumulate_steps": 1,
    "framework": "pytorch",
    "input_shape": (224, 224, 3),
    "classes": 1000,
    "intra_gbit": 800.0,
    "inter_gbit": 100.0,
    "link": "",
    "algorithm": BEST,
    "servers": 0,
    "cycle_ms": 1.0,
    "request_us": 0.0,
    "compression": "none",
    "gather_bits": 16,
    "ranks": (1, 2, 4, 8, 64, 512, 4096, 10_000, 100_000),
    "epochs": 90.0,
}
"""Values of flags that are not given. The parser has None for these, which tells what a user gives."""
RANKS_PER_NODE = 8
_MODES = {"loss_of_parameters": {"loss_of_parameters"}, "validate": {"validate", "measured", "collectives", "output"}}
"""Flags that may be given together with a flag that chooses another task than a forecast."""
_ALTERNATIVES = {
    "network": ("parameters", "model"),
    "parameters": ("model",),
    "run": ("step_ms", "batch_size", "baseline_ranks"),
    "buckets": ("cycle_ms", "request_us"),
    "no_overlap": ("contention",),
    "sharded": ("algorithm", "servers", "fusion_mib", "buckets", "cycle_ms", "request_us"),
}
"""Flags that cannot be given together with another one."""
_NEEDED = {
    "validate": ("measured",),
    "collectives": ("measured",),
    "samples": ("epochs", "critical_batch"),
    "algorithm": ("servers",),
    "sharded": ("gather_bits",),
    "model": ("framework", "input_shape", "classes"),
}
"""Flags that need another one, by the one that they need."""


def parse(prog: str, description: str | None, argv: list[str] | None) -> tuple[Namespace, frozenset[str]]:
    """Return the flags with their defaults, and the names of those that are given.

    Raises UserError if a flag or a value does not exist, or a given flag would have no effect.
    """
    parser = _parser(prog, description)
    flags = parser.parse_args(argv)
    given = frozenset(name for name, value in vars(flags).items() if value is not None and value is not False)
    _refuse(parser, flags, given)
    for name, value in DEFAULTS.items():
        if name not in given:
            setattr(flags, name, value)
    return flags, given


def _refuse(parser: Parser, flags: Namespace, given: frozenset[str]) -> None:
    for mode, names in _MODES.items():
        if mode in given and (others := sorted(given - names)):
            parser.error(f"expected no {flag_of(others[0])} with {flag_of(mode)}, received it; leave it out")
    for name, others in _ALTERNATIVES.items():
        for other in others:
            if {name, other} <= given:
                parser.error(f"expected {flag_of(name)} or {flag_of(other)}, received both; leave one out")
    for needed, names in _NEEDED.items():
        for name in names:
            if name in given and needed not in given:
                parser.error(f"expected {flag_of(needed)} with {flag_of(name)}, received none; give it")
    if "servers" in given and flags.algorithm != "parameter-servers":
        parser.error(f"expected --algorithm parameter-servers with --servers, received {flags.algorithm}; name it")
    if "contention" in given and flags.algorithm == "host-memory":
        parser.error("expected no --contention with --algorithm host-memory, received it; cores do that work")
    if {"validate", "collectives"} <= given and "measured" not in given:
        parser.error("expected --measured with --validate and --collectives, received none; give it")
    if not given & {"step_ms", "run", "validate", "loss_of_parameters"}:
        parser.error("expected the step time of one rank, received none; give --step-ms, or --run of a measured run")


def flag_of(name: str) -> str:
    """Return the flag of an attribute of parsed flags."""
    return f"--{name.replace('_', '-')}"


def count(maximum: int):
    """Return a type for whole numbers from 1 on that may be written as in 1e9."""

    def convert(text: str) -> int:
        try:
            value = float(text)
            text = str(int(value)) if value.is_integer() and "e" in text.lower() else text
        except (ValueError, OverflowError):
            pass
        return whole(1, maximum)(text)

    return convert


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(whole(1, 2**16)(word) for word in text.split(","))
    if len(sizes) not in (1, 3):
        raise argparse.ArgumentTypeError(f"to be H,W,C or a length, received {len(sizes)} sizes; give 1 or 3")
    return sizes


def _parser(prog: str, description: str | None) -> Parser:
    # Limits far beyond any machine, with products that are still finite.
    some, positive, part = number(0, 1e18), number(0, 1e18, above=True), number(0, 1)
    parser = Parser(prog, description)
    what = parser.add_argument_group("work of a rank")
    add = what.add_argument
    add("--network", type=nonempty_text, metavar="NAME", help="a known network (resnet50), or a YAML file of layers")
    add("--parameters", type=count(10**15), metavar="N", help="or a number of parameters in equal layers, as in 1e9")
    add("--model", type=nonempty_text, metavar="FILE.py:NAME", help="or a network of yours, built and tried once")
    add("--framework", type=one_of("pytorch", "tensorflow"), metavar="NAME", help="for --model; default: pytorch")
    add("--input-shape", type=_shape, metavar="H,W,C", help="for --model, or a text's length; default: 224,224,3")
    add("--classes", type=whole(1, MAX_COUNT), metavar="N", help="classes of --model; default: 1000")
    add("--batch-size", type=whole(1, MAX_COUNT), metavar="N", help="samples per rank and step; default: 32")
    add("--step-ms", type=positive, metavar="MS", help="step time of one rank, or of --baseline-ranks")
    add("--baseline-ranks", type=whole(1, MAX_COUNT), metavar="N", help="ranks whose step time that is; default: 1")
    run = "take these from a training run; repeat it for runs of more ranks, on which to calibrate"
    add("--run", type=nonempty_path, metavar="DIR", action="append", help=run)
    add("--backward-share", type=part, metavar="X", help="backward's share of a pass; default: 2/3")
    add("--accumulate-steps", type=whole(1, MAX_COUNT), metavar="N", help="passes in a step; default: 1")
    add("--optimizer-ms", type=some, metavar="MS", help="part of a step in which one rank updates all weights")
    jitter = "deviation of step times over mean; default: --run's, or fitted"
    add("--jitter", type=some, metavar="X", help=jitter)
    where = parser.add_argument_group("hosts and links")
    add = where.add_argument
    add("--ranks-per-node", type=whole(1, MAX_COUNT), metavar="N", help=f"default: --run's, or {RANKS_PER_NODE}")
    add("--intra-gbit", type=positive, metavar="GBIT/S", help="nominal bandwidth of a GPU in its host; default: 800")
    add("--inter-gbit", type=positive, metavar="GBIT/S", help="nominal bandwidth of a host; default: 100")
    add("--link", type=one_of(RDMA, TCP), metavar="KIND", help="rdma or tcp; default: rdma from 50 Gbit/s")
    add("--intra-us", type=some, metavar="US", help="latency of a hop in a host; default: usual")
    add("--inter-us", type=some, metavar="US", help="latency of a hop between hosts; default: usual")
    links = "measured links from allstep collectives: on the ranks of a host, or of several"
    add("--collectives", type=listed(nonempty_path), metavar="FILE,...", help=links)
    add("--contention", type=part, metavar="X", help="share of speed that backward loses; default: fitted")
    add("--crowding", type=number(1, 1e18), metavar="X", help="step time in a full over an idle host; default: fitted")
    add("--node-input", type=positive, metavar="N", help="samples/s that a host reads; default: no limit")
    add("--storage-input", type=positive, metavar="N", help="samples/s for all hosts; default: no limit")
    how = parser.add_argument_group("exchange of gradients")
    add = how.add_argument
    add("--algorithm", type=one_of(*ALGORITHMS, BEST), metavar="NAME", help=f"{', '.join(ALGORITHMS)}; default: best")
    servers = "dedicated parameter servers; default: one on each host"
    add("--servers", type=whole(1, MAX_COUNT), metavar="N", help=servers)
    add("--sharded", action="store_true", help="weights are sharded (FSDP): gathered twice, gradients scattered")
    add("--gather-bits", type=one_of("16", "32"), metavar="N", help="bits of a gathered weight; default: 16")
    add("--compression", type=one_of("none", "fp16", "bf16"), metavar="NAME", help="gradients in 16 bits")
    add("--fusion-mib", type=some, metavar="MIB", help="fusion threshold, default 128; or bucket size, default 25")
    add("--cycle-ms", type=some, metavar="MS", help="HOROVOD_CYCLE_TIME; default: 1")
    add("--buckets", action="store_true", help="buckets as in DDP")
    add("--request-us", type=some, metavar="US", help="rank 0's time per rank and gradient; default: 0")
    add("--no-overlap", action="store_true", help="communication begins after backward")
    watch = "leave out heartbeats and replica checks, as of a job that allstep does not watch"
    add("--no-control-plane", action="store_true", help=watch)
    parser.add_argument("--ranks", type=listed(whole(1, MAX_COUNT)), metavar="N,...")
    goal = parser.add_argument_group("time to accuracy")
    add = goal.add_argument
    add("--samples", type=count(10**15), metavar="N", help="samples in an epoch")
    add("--epochs", type=positive, metavar="X", help="epochs needed with small batches; default: 90")
    critical = "global batch that takes twice the epochs; default: --run's noise scale"
    add("--critical-batch", type=positive, metavar="N", help=critical)
    kept = "write the forecast, or the errors, as JSON"
    parser.add_argument("--output", type=files.output_file, metavar="FILE", help=kept)
    parser.add_argument("--validate", action="store_true", help="forecast published tables, and print the errors")
    parser.add_argument("--measured", type=nonempty_path, metavar="DIR", help="with --validate: results of compare")
    parser.add_argument("--loss-of-parameters", type=positive, metavar="N", help="print L(N) of a language model")
    return parser
