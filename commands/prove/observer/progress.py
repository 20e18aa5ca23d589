"""How far a process has trained, and where its loops are cut: after a step of the optimizer, in no accumulation."""

import ast
import dis
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_FIRST = 3
"""Length of the first epoch as a multiple of the others', so that a short epoch is seen to its end."""
_MORE_STEPS = 10
"""Steps observed after the second epoch, one in each loop."""


class Progress:
    """Loops and steps of a process. A step belongs to the loop whose loader has yielded last and has not ended."""

    def __init__(self, num_steps: int) -> None:
        self._limit = num_steps
        self._num_steps: dict[int, Counter[int]] = defaultdict(Counter)  # by replica and optimizer
        self._sizes: dict[int, tuple[bool, int]] = {}  # of optimizers
        self._open: list[int] = []
        self._training: list[int] = []  # loops with backward passes, in order
        self._steps_of_loop: dict[int, Counter[int]] = defaultdict(Counter)  # by loop and optimizer
        self._accumulating: set[int] = set()
        self._abandoned: set[int] = set()

    @property
    def loop(self) -> int:
        """Number of the current loop; 0 outside of all loops."""
        return self._open[-1] if self._open else 0

    def enter(self, loop: int) -> None:
        """Note that a loop's loader yields; loops inside of it have been left."""
        if loop in self._open:
            del self._open[self._open.index(loop) + 1 :]
        else:
            self._open = [one for one in self._open if one in self._training or one not in self._abandoned]
            self._open.append(loop)

    def abandon(self, loop: int) -> None:
        """Note that a loop's iterator is gone: if none trains in it, it was a mere look, as by `next(iter(loader))`."""
        self._abandoned.add(loop)

    def leave(self, loop: int) -> None:
        """Note that a loop's loader has ended."""
        if loop in self._open:
            del self._open[self._open.index(loop) :]

    def note_backward(self) -> None:
        """Note that gradients have been computed, which a step will apply."""
        self._accumulating.update(self._open)
        self._training += [loop for loop in self._open if loop not in self._training]

    def end_step(self, replica: int, optimizer: int, size: tuple[bool, int] = (False, 0)) -> bool:
        """Count a step of an optimizer, and return whether enough was observed.

        The largest optimizer that a wrapper covers decides, since all ranks have it, while some may have others. `size`
        tells whether a wrapper averages the optimizer's gradients, and its number of values.
        """
        self._num_steps[replica][optimizer] += 1
        if replica:
            return False
        self._sizes[optimizer] = max(size, self._sizes.get(optimizer, size))
        self.note_backward()  # Keras' gradients are not noted
        self._accumulating.clear()
        for loop in self._open:
            self._steps_of_loop[loop][optimizer] += 1
        return self.is_enough

    def _main(self, counts: Counter[int]) -> int:
        """Return the number of the main optimizer of those with these numbers of steps: the largest, or most used."""
        return max(counts, key=lambda one: (self._sizes.get(one, (False, 0)), counts[one]), default=0)

    @property
    def num_steps(self) -> int:
        """Number of steps of the process, or of its first replica."""
        return self.num_steps_of(0)

    def num_steps_of(self, replica: int) -> int:
        """Return the number of steps of a replica."""
        counts = self._num_steps[replica]
        return counts[self._main(counts)]

    @property
    def is_enough(self) -> bool:
        """Whether enough of the process was observed."""
        return self.num_steps >= (_FIRST + 1) * self._limit + _MORE_STEPS

    def is_over(self, loop: int, num_batches: int) -> bool:
        """Return whether a loop that has had some batches may be cut now."""
        if loop in self._accumulating:
            return False
        if loop in self._training:
            counts = self._steps_of_loop[loop]
            return counts[self._main(counts)] >= self.max_steps(loop)
        return num_batches >= (1 if len(self._training) > 2 else self._limit)

    def max_steps(self, loop: int) -> int:
        """Return the number of steps after which a training loop is cut."""
        index = self._training.index(loop) if loop in self._training else len(self._training)
        return [_FIRST * self._limit, self._limit, 1][min(index, 2)]

    @property
    def first_training_loop(self) -> int | None:
        """Number of the first loop in which the script has trained."""
        return next(iter(self._training), None)


_CUTS = ("cycle", "islice", "range", "take", "zip")
"""Functions and methods that iterate over another number of elements than something has."""
_LIMITS = {None, "limit_train_batches", "max_steps", "max_time", "overfit_batches"}
"""Arguments of Lightning's Trainer that end training within an epoch; None are those that are not written out."""
_ITERATES = ("FOR_ITER", "SEND", "YIELD_FROM")
"""Instructions of Python that end a loop, and nothing else, when an iterator ends."""


@functools.cache
def parsed(script: str | Path) -> ast.Module:
    """Return the syntax tree of a script, which does not change while it is observed and judged."""
    return ast.parse(Path(script).read_bytes())


def may_end_early(script: str, line: int) -> bool:
    """Return whether the `for` in a line of a script may end before its loader does, or start it over.

    The result is True if there is no `for`, except where Lightning's Trainer has whole epochs.
    """
    endless = [node for node in ast.walk(parsed(script)) if isinstance(node, ast.While)]
    for node in ast.walk(parsed(script)):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or line):
            called = {getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node.iter)}
            is_inside = any(one.lineno < line <= (one.end_lineno or line) for one in endless)
            return is_inside or not called.isdisjoint(_CUTS) or any(map(_leaves, node.body))
    calls = [node for node in ast.walk(parsed(script)) if isinstance(node, ast.Call)]
    names = {getattr(call.func, "attr", "") for call in calls if call.lineno <= line <= (call.end_lineno or line)}
    trainers = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == "Trainer"]
    given = {one.arg for call in trainers for one in call.keywords}
    return "fit" not in names or not given or not given.isdisjoint(_LIMITS)


def _leaves(node: ast.AST) -> bool:
    """Return whether a node leaves the loop; a test of a mere flag does not count (`if args.dry_run: break`)."""
    if isinstance(node, (ast.Break, ast.Return)):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute):
        return any(map(_leaves, node.orelse))
    return any(map(_leaves, ast.iter_child_nodes(node)))


def may_stop(frame: FrameType | None, scripts: Sequence[str]) -> bool:
    """Return whether an iteration that goes on in `frame` may be ended there.

    A script that calls `next` need not expect an end, as it may have counted the batches. Libraries that loop by
    themselves do, but their generators pass the end on to the script.
    """
    below = None
    while frame is not None and frame.f_code.co_filename not in scripts:
        below, frame = frame, frame.f_back
    if frame is None:
        return True
    is_driven = below is None or below.f_code.co_flags & inspect.CO_GENERATOR or below.f_code.co_name == "__next__"
    if not is_driven or dis.opname[frame.f_code.co_code[frame.f_lasti]] in _ITERATES:
        return True
    return any(frame.f_lineno in lines for lines in _lines_that_expect_an_end(frame.f_code.co_filename))


def _lines_that_expect_an_end(script: str) -> Iterator[range]:
    for node in ast.walk(parsed(script)):
        if isinstance(node, ast.Try) and any(_catches_the_end(handler) for handler in node.handlers):
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1)


def _catches_the_end(handler: ast.ExceptHandler) -> bool:
    names = {getattr(one, "id", None) for one in ast.walk(handler.type)} if handler.type else set()
    return handler.type is None or bool(names & {"StopIteration", "Exception", "BaseException"})
