"""What measuring the gradient noise scale costs, under Horovod on two ranks:

    OMP_NUM_THREADS=1 python -m allstep.benchmarks.noise_scale [--frameworks pytorch] [--steps N]

One step of some is measured, so a run has both sides in turn: the median time of the measured steps beyond that of the
others, spread over all steps, as a share of the latter.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.compare.synthetic import local_batch
from allstep.commands.shared.measure import Figure, job, print_table, run, save
from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank
from allstep.common.recipe.noise_scale import MEASURED_EVERY, is_measured

TARGET = "<= 0.01"
NETWORKS = {
    "cnn": ("--dataset", "synthetic", "--model", "cnn", "--batch-size", "64"),
    "resnet32": ("--dataset", "synthetic", "--model", "resnet32", "--batch-size", "16"),
}
WARM_UP = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.noise_scale", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--steps", type=whole(8, 10**6), default=400, metavar="N")
    parser.add_argument("--output", type=output_file, default="runs/noise_scale.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    rows: list[Figure] = []
    samples: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="allstep-noise-scale-") as directory:
        path = Path(directory) / "seconds.json"
        for framework in flags.frameworks:
            for network in NETWORKS:
                run(job(__spec__.name, "measure", framework, network, flags.steps, path))
                measured, others = samples[f"{framework} {network}"] = json.loads(path.read_text())
                one, other = statistics.median(measured), statistics.median(others)
                share = max(0.0, one - other) / MEASURED_EVERY / other
                name = f"{framework} {network}: cost a step of the noise scale, steps in ms"
                rows.append(Figure(name, 1e3 * one, 1e3 * other, share, TARGET))
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def measure(framework: str, network: str, num_steps: int, path: Path) -> None:
    """Write the seconds of the measured steps, and those of the others."""
    session = open_session(framework, [*NETWORKS[network], "--device", "cpu"])
    assert session is not None
    worker = session.worker
    assert worker.num_parts  # else nothing would be measured
    batch = local_batch(session.dataset, session.config, worker)
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(1, WARM_UP + num_steps + 1):
        started = time.perf_counter()
        result = worker.train_step(batch, 1e-3)
        # What the engine asks for, and until the last update is done.
        for pending in (result, result.squares_of_parts, result.square_of_average):
            float(pending)
        next(iter(worker.parameters()))
        if number > WARM_UP:
            seconds[0 if is_measured(number) else 1].append(time.perf_counter() - started)
    if session.placement.rank == 0:
        path.write_text(json.dumps(seconds))


def dispatch() -> None:
    """The command itself, or a rank, which it starts."""
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()


if __name__ == "__main__":
    run_rank(dispatch)
