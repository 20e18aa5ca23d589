"""Find out from the text of a script whether a collective carries what a call has computed."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from allstep.commands.prove.observer.progress import parsed
from allstep.commands.prove.records import BACKWARD, Collective, Forward, Waiting
from allstep.commands.prove.runs import Runs

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_PRINTING = ("print", "info", "debug", "warning", "write", "set_postfix", "add_scalar")
"""Methods that take values and keep none."""
_COMPARISON = re.compile(r"(@|mm\(|matmul\().*\.(T\b|t\(\))|\bcdist\(|off_diagonal|InfoNCE|NTXent|[Cc]ontrastive")
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
    if discards(script, source):
        return True
    *inner, last = calls
    names: set[str] = set()
    changes_arguments = False
    for line in inner:
        flow = _Flow(_scope(tree, line), line, names, changes_arguments)
        names, changes_arguments = flow.names_for_the_caller(), flow.changes_arguments()
    flow = _Flow(_scope(tree, last), last, names, changes_arguments)
    return flow.scope is not _scope(tree, ends[-1]) or flow.reaches(ends[-1])


def compares_ranks(runs: Runs) -> bool:
    """Return whether losses depend on samples of other ranks, which a model, or the script after it, gathers."""
    gathers: list[Collective] = []
    if any(step.sharded for step in runs.together.ranks[0].steps()[:1]):  # FSDP gathers weights
        return False
    for record in runs.together.ranks[0].records:
        if isinstance(record, Forward) and record.rows:
            gathers = []
            if record.is_training and any("gather" in kind for kind in record.collectives):
                return True
        elif isinstance(record, Collective) and "gather" in record.kind:
            gathers.append(record)
        elif isinstance(record, Waiting) and record.what == BACKWARD and gathers:
            return any(carries(runs.script, one.callers, (record.line,)) for one in gathers)
    return False


def may_compare_own(runs: Runs) -> bool:
    """Return whether the script compares samples, as of contrastive losses, and no collective is between its passes."""
    text = runs.script.read_text() if runs.script else ""
    reduces = False
    for record in runs.together.ranks[0].records if _COMPARISON.search(text) else ():
        if isinstance(record, Forward) and record.rows:
            reduces = bool(record.collectives)
        elif isinstance(record, Collective):
            reduces = True
        elif isinstance(record, Waiting) and record.what == BACKWARD:
            return not reduces
    return False


def discards(script: Path | None, source: Sequence[str]) -> bool:
    """Return whether nothing uses the result of a call, so that the text does not show what keeps it."""
    nodes = ast.walk(parsed(script)) if script and source else ()
    return any(_is_mere_call(node) and _contains(node, _numbers(source)[0]) for node in nodes)


def _is_mere_call(node: ast.AST) -> bool:
    """Return whether a node is a statement such as `model(batch)`."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    inner = (one for part in (*node.value.args, *node.value.keywords) for one in ast.walk(part))
    called = {getattr(one.func, "attr", "") for one in inner if isinstance(one, ast.Call)}
    return called <= {"to", "cuda"}


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

    def __init__(self, scope: _Scope, line: int, names: set[str], changes_arguments: bool) -> None:
        """Start at a call in a line, which gives values to some `names`, and to its arguments if it changes them."""
        self.scope = scope
        self._line = line
        self._given, self._changes_arguments = names, changes_arguments
        self._names: set[str] = set()
        self._changed: set[str] = set()  # names of objects that take values, and are not bound anew
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
        return {name for name in self._names if "." in name or name in _shared(self.scope)} | (
            self._changed - _bound(self.scope)
        )

    def changes_arguments(self) -> bool:
        """Return whether a parameter, or an attribute of one, has the values."""
        arguments = _parameters(self.scope)
        return any(name.partition(".")[0] in arguments for name in self._names if "." in name or name in self._changed)

    def _call(self, parts: Sequence[ast.expr]) -> None:
        """Give values to what the call gives them to."""
        self._names |= self._given
        if self._changes_arguments:
            calls = (call for part in parts for call in ast.walk(part) if isinstance(call, ast.Call))
            self._change({name for call in calls for part in _parts(call) for name in _names(part)})

    def _change(self, names: set[str]) -> None:
        self._names |= names
        self._changed |= names

    def _follow(self, statements: Sequence[ast.stmt], *, until: int | None) -> bool:
        for statement in statements:
            parts = list(_expressions(statement))
            if is_call := any(_contains(part, self._line) for part in parts):
                self._call(parts)
            has_value = is_call or any(map(self._uses, parts))
            if until is not None and any(_contains(part, until) for part in parts) and has_value:
                return True
            targets = {name for target in _targets(statement) for name in _names(target)}
            if has_value:
                self._names |= targets
                self._change({name for part in parts for name in self._receivers(part)})
                if isinstance(statement, ast.AugAssign):
                    self._change(targets)
            elif isinstance(statement, ast.Assign):
                self._names -= targets
        return False

    def _uses(self, node: ast.AST) -> bool:
        if not self._names.isdisjoint(_names(node)):
            return True
        owners = {name.rpartition(".")[0] for name in self._names if "." in name}
        return any(
            isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) in owners
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            for part in _parts(call)
        )

    def _receivers(self, node: ast.AST) -> Iterator[str]:
        """Yield the objects whose methods take a value, such as a list or a metric."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and any(map(self._has_value, (*call.args, *call.keywords))):
                is_kept = isinstance(call.func, ast.Attribute) and call.func.attr not in _PRINTING
                owner = getattr(call.func, "value", None) if is_kept else None
                while isinstance(owner, (ast.Subscript, ast.Call)):
                    owner = owner.value if isinstance(owner, ast.Subscript) else owner.func
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


def _parts(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the arguments of a call, and the object that it calls, or whose method it calls."""
    yield from (*call.args, *(one.value for one in call.keywords))
    yield call.func.value if isinstance(call.func, ast.Attribute) else call.func


def _parameters(scope: _Scope) -> set[str]:
    if isinstance(scope, ast.Module):
        return set()
    own = scope.args
    return {one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg) if one}


def _shared(scope: _Scope) -> set[str]:
    """Return the names that a function declares as those of a scope around it."""
    nodes = (node for node in ast.walk(scope) if isinstance(node, (ast.Global, ast.Nonlocal)))
    return {name for node in nodes for name in node.names}


def _bound(scope: _Scope) -> set[str]:
    """Return the names of a function's own variables."""
    stored = {one.id for one in ast.walk(scope) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return (_parameters(scope) | stored) - _shared(scope)


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        yield from statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        yield statement.target
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        yield from (one.optional_vars for one in statement.items if one.optional_vars)
    for expression in _expressions(statement):
        yield from (one.target for one in ast.walk(expression) if isinstance(one, ast.NamedExpr))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the variables in a node, and its attributes such as `self.total`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            yield ast.unparse(one)
