"""The loss around the weights of a checkpoint, along random directions whose filters have the weights' norms.

    python -m allstep.commands.study.landscape --config DIR/config.yaml --init-from latest --output FILE

Weights w are moved to w + a d (Li et al. 2018, section 3): each filter of the Gaussian direction d is scaled to the
norm of the same filter of w, so that networks that differ only in scale are compared at the same distance; biases and
the weights of normalisation layers stay. The loss is that of the training samples, as the trainer evaluates it. FILE
gets a line of JSON for each distance a, averaged over the directions, and one with `mean_rise`, the mean loss at all
distances minus the loss at the weights themselves: small for flat minima.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records.files import output_file
from allstep.common.base.errors import UserError, warn
from allstep.common.base.flag_types import Parser, number, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.files.disk import write_atomically
from allstep.common.process.exit import run_rank
from allstep.common.training import resuming
from allstep.common.training.metrics import evaluate
from allstep.common.watch import ProgressState

_WEIGHT = "model/"
_BATCH = 1024  # samples evaluated at once; affects only speed


def main(argv: Sequence[str] | None = None) -> None:
    flags, trainer_flags = _parser().parse_known_args(argv)
    session = open_session(flags.framework, [*trainer_flags, "--strategy", "single"])
    assert session is not None  # None is only for processes that serve other ranks
    if not session.config.output.init_from:
        raise UserError("expected --init-from with the checkpoint to look at, received none; name one")
    worker, split = session.worker, session.dataset.train
    state = resuming.load(session.config, len(split), worker.state_shapes(), warn)
    kept = {name: array for name, array in state.arrays.items() if name.startswith(_WEIGHT)}
    weights = {name: array for name, array in kept.items() if array.dtype.kind == "f"}

    def loss_at(direction: Mapping[str, np.ndarray], distance: float) -> float:
        moved = {name: array + np.float32(distance) * direction[name] for name, array in weights.items()}
        worker.import_state(kept | moved, step=0)
        return evaluate(worker, split, _BATCH, ProgressState(), session.validation_metrics).loss

    directions = [filter_normalised(weights, seed=number) for number in range(flags.directions)]
    distances = np.linspace(-flags.distance, flags.distance, 2 * flags.steps + 1)
    losses = [float(np.mean([loss_at(one, distance) for one in directions])) for distance in distances]
    rise = float(np.mean(losses)) - losses[flags.steps]
    rows = [{"distance": float(one), "loss": loss} for one, loss in zip(distances, losses, strict=True)]
    with write_atomically(flags.output) as stream:
        for row in (*rows, {"mean_rise": rise}):
            stream.write(f"{json.dumps(row, allow_nan=False)}\n".encode())


def filter_normalised(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """Return a Gaussian direction whose filters (along axis 0) have the norms of the weights'; 0 for 1-D arrays."""
    generator, found = np.random.default_rng(seed), {}
    for name, array in sorted(weights.items()):
        if array.ndim < 2:
            found[name] = np.zeros_like(array)
            continue
        random = generator.standard_normal(array.shape).astype(np.float32)
        axes = tuple(range(1, array.ndim))
        norms = [np.sqrt(np.sum(one * one, axis=axes, keepdims=True)) for one in (array, random)]
        found[name] = random * (norms[0] / norms[1])
    return found


def _parser() -> Parser:
    parser = Parser("python -m allstep.commands.study.landscape", __doc__)
    add = parser.add_argument
    add("--framework", type=one_of(*FRAMEWORKS), default=FRAMEWORKS[0], help=" or ".join(FRAMEWORKS))
    add("--output", type=output_file, required=True, metavar="FILE", help="file for the losses")
    add("--directions", type=whole(1, 1000), default=3, metavar="N", help="directions to average over (3)")
    add("--distance", type=number(0, 1000, above=True), default=1.0, metavar="A", help="to the outermost points (1)")
    add("--steps", type=whole(1, 1000), default=10, metavar="N", help="points on either side (10)")
    return parser


if __name__ == "__main__":
    run_rank(main)
