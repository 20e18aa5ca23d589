"""Find out from the text of the script whether a loop ends after all batches of a loader, or may end earlier."""

import ast
import dis
import functools
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

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
