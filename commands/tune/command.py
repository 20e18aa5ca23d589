"""Search for the flags that train best, with Optuna: each trial is a separate training, with any launcher.

    allstep tune space.yaml --study lr.journal --trials 30 --epochs 5
    allstep tune space.yaml --study lr.db --launch "horovodrun -np 4" --framework tensorflow --dataset mnist

space.yaml names flags of the trainers and the values to try for each:

    base-lr: {low: 1.0e-4, high: 1.0, log: true}
    momentum: {low: 0.0, high: 0.99}
    optimizer: [sgd, nesterov]

All other flags are the trainers', and the same in every trial. After each epoch, a trial that is worse than the median
of the others is pruned, on all ranks at once. The study is a file: a killed search can be resumed, and several searches
may work on it at the same time, also from several hosts. The best flags are written next to it, as a file for --config,
and so are all trials, of which allstep report makes figures. If its name ends in .db, .sqlite or .sqlite3, the study is
an SQLite database, otherwise a journal. The ranks of a trial divide their host's cores; if several searches share a
host, set OMP_NUM_THREADS for each.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.commands.shared.jobs import Outcome, run_job
from allstep.commands.shared.records.files import command, written_whole
from allstep.commands.tune.space import Space, corners, read_space
from allstep.commands.tune.study import DIRECTIONS, keep_trials, next_trial, open_study
from allstep.common.api.session import words_of
from allstep.common.base.errors import Fault, UserError, note, print_line, quote
from allstep.common.base.flag_types import (
    MAX_COUNT,
    WEEK,
    Parser,
    flag_name,
    nonempty_path,
    nonempty_text,
    number,
    one_of,
    whole,
)
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES
from allstep.common.cli.command_line import parse, parse_beside
from allstep.common.files.disk import try_file
from allstep.common.launch.placement import ALONE
from allstep.common.process.requirements import need_frameworks
from allstep.common.training.steps_in_flight import DIVERGED

if TYPE_CHECKING:
    import argparse

    from optuna import Study
    from optuna.trial import Trial

_DEFAULT_SECONDS = 24 * 3600.0


def main(argv: Sequence[str] | None = None) -> None:
    flags, trainer_flags = parse_beside(_parser(), argv)
    need_frameworks([flags.framework], by="allstep tune")
    space = read_space(flags.space)
    if twice := sorted(space.keys() & set(map(flag_name, trainer_flags))):
        raise UserError(f"expected --{twice[0]} as a flag or in {quote(flags.space)}, received both; give one of them")
    for values in corners(space):  # refuses flags that no trial could train with
        parse(tuple(STRATEGIES[flags.framework]), ALONE, [*trainer_flags, *words_of(values)])
    try:
        try_file(flags.study)
    except OSError as error:
        raise UserError(f"expected to write {quote(flags.study)}: {error.strerror}; name another --study") from None
    study = open_study(flags.study, metric=flags.metric)
    typed = command("tune", argv)
    num_ended = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    with ProgressBar(flags.trials, done=num_ended) as progress:
        while _run_next(study, flags, trainer_flags, space, progress):
            keep_trials(study, flags.study, metric=flags.metric, command=typed)
    _keep_best(study, flags.study)


def _parser() -> Parser:
    parser = Parser("allstep tune", __doc__)
    add = parser.add_argument
    add("space", type=nonempty_path, metavar="SPACE.yaml", help="flags, and the values to try")
    add("--study", type=nonempty_path, required=True, metavar="FILE", help="the study, created if missing")
    add("--trials", type=whole(1, MAX_COUNT), default=20, metavar="N", help="trials of the whole study (20)")
    add("--framework", type=one_of(*FRAMEWORKS), default=FRAMEWORKS[0], help=f"{' or '.join(FRAMEWORKS)}")
    add("--metric", type=one_of(*DIRECTIONS), default="accuracy", help="validation metric: accuracy or loss")
    add("--launch", type=nonempty_text, metavar="WORDS", help='a launcher: "horovodrun -np 4 -H a:2,b:2"')
    add("--trial-timeout", type=number(1, WEEK), default=_DEFAULT_SECONDS, metavar="S", help="limit of a trial (a day)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="seed of the search and of every training (0)")
    return parser


def _run_next(
    study: Study, flags: argparse.Namespace, trainer_flags: Sequence[str], space: Space, progress: ProgressBar
) -> bool:
    """Run one more trial, if the study lacks any; returns whether it did."""
    with next_trial(study, flags.study, space, flags.trials, seed=flags.seed) as (trial, num_killed):
        if num_killed:
            note(f"{num_killed} trial(s) of a killed search will be tried again")
        if trial is None:
            return False
        progress.begin(f"trial {trial.number} ({flags.trials} in all)", in_log=False)
        words = [*trainer_flags, "--seed", str(flags.seed), *words_of(trial.params)]
        outcome = run_job([_command(flags, trial.number, words)], time_limit=flags.trial_timeout, num_threads=None)
        progress.end(_finish(study, trial, outcome))
    return True


def _command(flags: argparse.Namespace, number: int, words: Sequence[str]) -> list[str]:
    launcher = shlex.split(flags.launch or "")
    python = [] if launcher and Path(launcher[0]).name == "torchrun" else ["python"]
    own = ("--framework", flags.framework, "--study", flags.study.absolute(), "--number", number)
    module = ("-m", "allstep.commands.tune.trial", *own, "--metric", flags.metric)
    return [*map(str, (*launcher, *python, *module)), *words]


def _finish(study: Study, trial: Trial, outcome: Outcome) -> str:
    """Report to Optuna how the trial ended, and return a line about it.

    Raises Fault if the training failed for another reason than divergence.
    """
    from optuna.trial import TrialState

    reported = study.get_trials(deepcopy=False)[trial.number].user_attrs
    values = " ".join(words_of(trial.params))
    diverged = outcome.reason is not None and DIVERGED in outcome.reason
    if outcome.status != "ok" and not diverged:
        study.tell(trial.number, state=TrialState.FAIL)
        raise Fault(f"trial {trial.number} ({values}) failed: {outcome.reason}")
    if diverged or reported["is_pruned"]:
        study.tell(trial.number, state=TrialState.PRUNED)
        return f"trial {trial.number}: {'diverged' if diverged else 'pruned'}  {values}"
    study.tell(trial.number, reported["value"])
    return f"trial {trial.number}: {reported['value']:.5g}  {values}"


def _keep_best(study: Study, path: Path) -> None:
    """Print the best flags, and write them to a file for --config."""
    import yaml
    from optuna.trial import TrialState

    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        raise UserError(
            f"expected a trial that trained to its end in {quote(path)}, received only pruned ones; lower the range "
            "of --base-lr, or raise --trials"
        )
    best, kept = study.best_trial, path.with_name(f"{path.stem}.best.yaml")
    with written_whole(kept) as stream:
        stream.write(yaml.safe_dump(dict(best.params), sort_keys=False).encode())
    print_line(f"best: trial {best.number}, {best.value:.5g}: {' '.join(words_of(best.params))}  (--config {kept})")
