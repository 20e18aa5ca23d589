"""Finds where a program assigns to another module: its attributes, its classes' attributes, or `sys.argv`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

_PLACEHOLDER = re.compile(r"\{[^{}\n]*\}")


def foreign_assignments(tree: ast.AST) -> Iterator[str]:
    """Yield the source of each such target. The result of a call counts as the caller's, except an imported module."""
    nodes = list(ast.walk(tree))
    foreign = _foreign_names(nodes)
    for node in nodes:
        for target in _targets(node):
            owner = target
            while isinstance(owner, (ast.Attribute, ast.Subscript)):
                owner = owner.value
            is_attribute = isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in foreign
            if is_attribute or ast.unparse(target).startswith("sys.argv"):
                yield ast.unparse(node).partition("\n")[0]


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the targets that a statement assigns to or deletes, or that a call of setattr or delattr changes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        targets = [ast.Attribute(node.args[0], "any")]
    else:
        return
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        yield from (part.value if isinstance(part, ast.Starred) else part for part in parts)


def _foreign_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the imported names, and the names assigned from them without a call."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_foreign(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.For) and "sys.modules" in ast.unparse(node.iter):
            names |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return names


def _is_foreign(value: ast.AST, names: set[str]) -> bool:
    while isinstance(value, ast.Attribute):
        value = value.value
    is_import = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("import_module")
    return is_import or (isinstance(value, ast.Name) and value.id in names)


def programs(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a program and all programs inside its string literals."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if "import " in text:
            try:
                yield ast.parse(_PLACEHOLDER.sub("x", text))
            except SyntaxError:
                continue
