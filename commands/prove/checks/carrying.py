"""Find out from the text of a script whether a collective carries what a call has computed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from allstep.commands.prove.observer.loops import parsed

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@functools.cache
def carries(script: Path | None, source: tuple[str, ...], sink: tuple[str, ...]) -> bool:
    """Return whether a collective may carry what a call has computed; True if the text does not tell.

    `source` are the lines of the script that were being run at the call, from the innermost to the outermost; `sink`
    are such lines at the collective.
    """
    calls, ends = _numbers(source), _numbers(sink)
    while calls and ends and calls[-1] == ends[-1]:
        calls.pop()
        ends.pop()
    if script is None or not calls or not ends:
        return True
    tree = parsed(script)
    *inner, last = calls
    names: set[str] = set()
    for line in inner:
        names = _Flow(_scope(tree, line), line, names).names_for_the_caller()
    flow = _Flow(_scope(tree, last), last, names)
    return flow.scope is not _scope(tree, ends[-1]) or flow.reaches(ends[-1])


def _numbers(lines: Sequence[str]) -> list[int]:
    return [int(line.rpartition(":")[2]) for line in lines if line]


def _scope(tree: ast.Module, line: int) -> _Scope:
    """Return the innermost function around a line."""
    found: _Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _contains(node, line):
            found = node if found is tree or node.lineno >= getattr(found, "lineno", 0) else found
    return found


def _contains(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


class _Flow:
    """Follows values through the statements of a function, from a line on."""

    def __init__(self, scope: _Scope, line: int, attributes: set[str]) -> None:
        self.scope = scope
        self._line = line
        self._names = set(attributes)
        self._statements = list(_statements(scope.body))
        loops = [node for node in ast.walk(scope) if isinstance(node, _LOOPS) and _contains(node, line)]
        innermost = max(loops, key=lambda node: node.lineno, default=None)
        self._begin = innermost.lineno if innermost else line
        if innermost:  # values of a pass of the loop reach the next one
            self._follow([one for one in self._statements if _contains(innermost, one.lineno)], until=None)

    def reaches(self, line: int) -> bool:
        """Return whether the statement in a line uses the values."""
        return self._follow([one for one in self._statements if (one.end_lineno or 0) >= self._begin], until=line)

    def names_for_the_caller(self) -> set[str]:
        """Return the attributes and globals with the values; the call itself is taken to return them."""
        self.reaches(0)
        shared = {name for node in ast.walk(self.scope) if isinstance(node, ast.Global) for name in node.names}
        return {name for name in self._names if "." in name or name in shared}

    def _follow(self, statements: Sequence[ast.stmt], *, until: int | None) -> bool:
        for statement in statements:
            parts = list(_expressions(statement))
            has_value = any(_contains(part, self._line) or self._uses(part) for part in parts)
            if until is not None and any(_contains(part, until) for part in parts) and has_value:
                return True
            targets = {name for target in _targets(statement) for name in _names(target)}
            if has_value:
                self._names |= targets
                self._names |= {name for part in parts for name in self._receivers(part)}
            elif isinstance(statement, ast.Assign):
                self._names -= targets
        return False

    def _uses(self, node: ast.AST) -> bool:
        return not self._names.isdisjoint(_names(node))

    def _receivers(self, node: ast.AST) -> Iterator[str]:
        """Yield the objects whose methods take a value, such as a list or a metric."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and any(map(self._has_value, (*call.args, *call.keywords))):
                owner = call.func.value if isinstance(call.func, ast.Attribute) else None
                if isinstance(owner, (ast.Name, ast.Attribute)):
                    yield ast.unparse(owner)

    def _has_value(self, node: ast.AST) -> bool:
        return self._uses(node) or any(
            _contains(one, self._line) for one in ast.walk(node) if isinstance(one, ast.Call)
        )


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in the order of the text, except those of functions inside."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(statement, field, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself, except those of statements inside and those assigned to."""
    children = [statement.value] if isinstance(statement, ast.Assign) else ast.iter_child_nodes(statement)
    for child in children:
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        yield from statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        yield statement.target
    for expression in _expressions(statement):
        yield from (one.target for one in ast.walk(expression) if isinstance(one, ast.NamedExpr))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the variables in a node, and its attributes such as `self.total`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            yield ast.unparse(one)
