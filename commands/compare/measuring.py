"""One comparison: its results directory, and the measurements that are still missing."""

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from allstep.commands.compare import gate, samples
from allstep.commands.compare.cells import INDEPENDENT, Cell, Settings, commands, strategy_entry, unavailable
from allstep.commands.compare.records import SUMMARY, CellResult, ComparisonResult, Sample, Summary, Verdict
from allstep.commands.compare.table import against, rules
from allstep.commands.shared import machine
from allstep.commands.shared.jobs import Outcome, scratch_folder
from allstep.commands.shared.records import files
from allstep.commands.shared.records.measured import Measured
from allstep.commands.shared.turns import Launch, Watch, run_in_turn
from allstep.common.base.errors import UserError, print_line, warn
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.files.strict_json import Mismatch, NotJson

REPOSITORY = Path(__file__).resolve().parents[2]
KeptT = TypeVar("KeptT", Sample, Verdict, ComparisonResult)
GoodT = TypeVar("GoodT", Sample, Verdict)


class Comparison:
    """A results directory and the measurements that it still lacks."""

    def __init__(
        self,
        directory: Path,
        cells: Sequence[Cell],
        settings: Settings,
        *,
        num_rounds: int,
        time_limit: float,
        command: str,
        oversubscribe: bool = False,
    ) -> None:
        """Read what an earlier call left in `directory`.

        Raises UserError if it was begun by another version, with other settings or on another machine.
        """
        self._directory, self._cells, self._settings = directory, cells, settings
        self._num_rounds, self._time_limit, self._command = num_rounds, time_limit, command
        self._oversubscribe = oversubscribe
        self._machine = machine.describe(REPOSITORY, threads_per_rank=settings.threads_per_rank)
        self._created = files.now()
        if earlier := _read(ComparisonResult, directory / SUMMARY):
            self._check_same(earlier)
            self._created = earlier.created
        num_gpus = machine.num_visible_gpus() if settings.device == "cuda" else None
        self._unavailable = dict(unavailable(cells, oversubscribe=oversubscribe, num_gpus=num_gpus))
        runs = (gate.gate_run(cell, settings) for cell in cells if cell.id not in self._unavailable)
        self._gate_runs = list(dict.fromkeys(filter(None, runs)))
        self._gates = {run.id: self._read_good(Verdict, gate_path(directory, run.id)) for run in self._gate_runs}
        self._samples = {
            cell.id: [self._read_good(Sample, sample_path(directory, cell.id, number)) for number in range(num_rounds)]
            for cell in cells
        }

    def run(self) -> None:
        """Judge all curves, then launch all cells round by round."""
        self.write(finished=False)
        runs = [run for run in self._gate_runs if self._gates[run.id] is None]
        rounds = range(self._num_rounds)
        num_due = sum(self._is_due(cell, number) for cell in self._cells for number in rounds)
        # A launch is half a part while it starts, and half while it takes its turns.
        with ProgressBar(len(runs) + num_due) as progress:
            self._judge(runs, progress)
            num_begun = 0
            for number, cells in itertools.product(rounds, self._launched_together()):
                due = [cell for cell in cells if self._is_due(cell, number)]

                def watch(launch: int, num_turns: int, due: Sequence[Cell] = due, before: int = num_begun) -> None:
                    if num_turns:
                        progress.advance(0.5 / self._num_turns(due[launch]))
                    else:
                        progress.reach(len(runs) + before + launch / 2)
                        progress.begin(f"cell {before + launch + 1} of {num_due}: {due[launch].id}")

                for sample in self._measure(due, number, watch):
                    found = sample.reason or f"{sample.images_per_second:.1f} images/s"
                    print_line(f"round {number + 1}: {sample.cell_id}: {found}", sys.stderr)
                num_begun += len(due)
                if due:
                    progress.reach(len(runs) + num_begun)
                    self.write(finished=False)

    def _judge(self, runs: Sequence[gate.GateRun], progress: ProgressBar) -> None:
        """Train the curves that are not judged yet, and keep a verdict on each."""

        def launch(commands: Sequence[list[str]]) -> list[Outcome]:
            def watch(number: int, num_turns: int) -> None:
                if not num_turns and len(commands) == len(runs):  # few are trained with other seeds as well
                    progress.reach(number)
                    progress.begin(f"gate: curve {number + 1} of {len(runs)}")

            starting = 2 if self._settings.turns else 1  # each one starts while the one before still runs
            with scratch_folder("compare") as folder:
                launches = [Launch([one], folder / str(number), polls=False) for number, one in enumerate(commands)]
                return self._run(launches, starting=starting, watch=watch)

        judge = gate.Gate(self._settings.gate_steps, launch, device=self._settings.device)
        judge.train(runs)
        for run in runs:
            verdict = judge.judge(run, gate.reference_of(run, self._gate_runs))
            verdict = dataclasses.replace(verdict, created=self._created)
            files.write(gate_path(self._directory, run.id), verdict)
            self._gates[run.id] = verdict
            print_line(f"gate: {run.id}: {verdict.reason or verdict.status}", sys.stderr)
        progress.reach(len(runs))

    def _num_turns(self, cell: Cell) -> int:
        """Return the number of turns of a launch, one of which is its end."""
        return 1 + (self._settings.num_iters if cell.input == "synthetic" else self._settings.epochs)

    def write(self, *, finished: bool) -> ComparisonResult:
        """Write compare.json and return what it holds."""
        verdicts = {cell.id: self._verdict(cell) for cell in self._cells}
        summaries = {cell.id: samples.summarise(self._samples[cell.id]) for cell in self._cells}
        comparable = {
            cell.id
            for cell in self._cells
            if summaries[cell.id].images_per_second
            and (cell.strategy == INDEPENDENT or verdicts[cell.id].status == "passed")
        }
        first_framework = self._cells[0].framework
        summary = ComparisonResult(
            created=self._created,
            updated=files.now(),
            finished=finished,
            command=self._command,
            settings=self._settings,
            num_rounds=self._num_rounds,
            rules=tuple(rules(self._settings, num_rounds=self._num_rounds, oversubscribe=self._oversubscribe)),
            environment=self._machine,
            cells=tuple(
                CellResult(
                    **vars(cell),
                    **vars(self._as_unavailable(cell, summaries[cell.id])),
                    gate=verdicts[cell.id],
                    comparable=cell.id in comparable,
                    command=self._commands_text(cell),
                    samples=tuple(
                        str(sample_path(Path(), cell.id, number))
                        for number, sample in enumerate(self._samples[cell.id])
                        if sample
                    ),
                    target_accuracy=self._settings.target_accuracy if cell.input == "real" else None,
                    efficiency=samples.efficiency(cell, self._samples, comparable, first_framework=first_framework),
                    against=against(cell, self._cells, self._samples, comparable),
                )
                for cell in self._cells
            ),
        )
        files.write(self._directory / SUMMARY, summary)
        return summary

    def _check_same(self, earlier: ComparisonResult) -> None:
        expected = {**vars(earlier.settings), **_identity(earlier.environment)}
        received = {**vars(self._settings), **_identity(self._machine)}
        for name, value in expected.items():
            if received[name] != value:
                raise UserError(
                    f"expected {name.replace('_', '-')} {value}, with which {self._directory} was begun, received "
                    f"{received[name]}; one comparison has one of them: give another --output-dir"
                )

    def _verdict(self, cell: Cell) -> Verdict:
        run = gate.gate_run(cell, self._settings)
        if run is None:
            return Verdict("none", gate.why_none(cell))
        return self._gates.get(run.id) or Verdict("none", "not judged")

    def _as_unavailable(self, cell: Cell, summary: Summary) -> Summary:
        reason = self._unavailable.get(cell.id)
        return dataclasses.replace(summary, status="unavailable", reason=reason) if reason else summary

    def _is_due(self, cell: Cell, number: int) -> bool:
        """Return whether a sample is missing; a cell that failed is not launched again in this call."""
        samples = self._samples[cell.id]
        failed = any(sample and not sample.good for sample in samples)
        return samples[number] is None and not failed and cell.id not in self._unavailable

    def _launched_together(self) -> list[list[Cell]]:
        """Return groups of cells that take turns: those of a table, compiled or not, or with --no-turns one by one.

        Cells that are ranked against each other (one framework, as many ranks) follow each other.
        """
        if not self._settings.turns:
            return [[cell] for cell in self._cells]
        tables = itertools.groupby(self._cells, lambda cell: dataclasses.replace(cell, compiled=False).table)
        return [sorted(cells, key=attrgetter("framework", "ranks")) for _, cells in tables]

    def _measure(self, cells: Sequence[Cell], number: int, watch: Watch) -> list[Sample]:
        target, launches, measured = self._settings.target_accuracy, [], []
        with scratch_folder("compare") as folder:
            for index, cell in enumerate(cells):
                own = folder / str(index)
                own.mkdir()
                processes, outputs = commands(cell, self._settings, own, turns=own / "turns")
                launches.append((Launch(processes, own / "turns", strategy_entry(cell).polls), outputs))
            measures_start = all(cell.input == "synthetic" for cell in cells)
            starting = 1 if measures_start else 2
            outcomes = self._run([launch for launch, _ in launches], starting=starting, watch=watch)
            for cell, (launch, outputs), outcome in zip(cells, launches, outcomes, strict=True):
                good = outcome.status == "ok"
                written = [files.read_json(Measured, output) for output in outputs if good]
                sample = samples.make(cell, number, outcome, written, target=target, commands=launch.commands)
                sample = dataclasses.replace(sample, created=self._created)
                files.write(sample_path(self._directory, cell.id, number), sample)
                self._samples[cell.id][number] = sample
                measured.append(sample)
        return measured

    def _read_good(self, kind: type[GoodT], path: Path) -> GoodT | None:
        """Return the result of an earlier call; None if it failed, so that it is measured again.

        Results of other comparisons are ignored: without their compare.json their settings are unknown.
        """
        kept = _read(kind, path)
        return kept if kept and kept.good and kept.created == self._created else None

    def _run(self, launches: Sequence[Launch], *, starting: int, watch: Watch) -> list[Outcome]:
        limits = {"time_limit": self._time_limit, "num_threads": self._settings.threads_per_rank}
        return run_in_turn(launches, **limits, starting=starting, watch=watch)

    def _commands_text(self, cell: Cell) -> str:
        launches, _ = commands(cell, self._settings, Path("FOLDER"))
        return " & ".join(f"OMP_NUM_THREADS={self._settings.threads_per_rank} {shlex.join(one)}" for one in launches)


def sample_path(directory: Path, cell_id: str, number: int) -> Path:
    """Return the path of the sample of a cell in a round."""
    return directory / "samples" / _as_name(cell_id) / f"{number:02d}.json"


def gate_path(directory: Path, gate_id: str) -> Path:
    """Return the path of the verdict on a curve."""
    return directory / "gates" / f"{_as_name(gate_id)}.json"


def _as_name(word: str) -> str:
    """Return a unique file name for an id, which may contain a path as the name of the network."""
    return quote(word, safe=":")


def _read(kind: type[KeptT], path: Path) -> KeptT | None:
    """Read a file of a comparison; return None if there is none, or if it is broken, with a warning.

    Raises UserError if another program wrote the file, or another version of this one.
    """
    try:
        return files.read(kind, path)
    except FileNotFoundError:
        return None
    except files.OtherFormat as error:
        raise UserError(f"{path}: {error}; give another --output-dir") from None
    except (OSError, NotJson, Mismatch) as error:
        warn(f"{path} cannot be read ({error}); it is measured again")
        return None


def _identity(environment: machine.Environment) -> dict[str, object]:
    """Return the facts that must not change while a comparison is measured."""
    return {
        "versions": environment.versions,
        "host": environment.hostname,
        "processor": environment.processor.name,
        "commit": environment.git and environment.git.commit,
        "variables": environment.variables,
    }
