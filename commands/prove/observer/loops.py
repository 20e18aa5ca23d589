"""How a loop of the script may end, by its text: after all batches of a loader, or where the script leaves it."""

from __future__ import annotations

import ast
from pathlib import Path

_CUTS = ("islice", "range", "take", "zip")
"""What iterates over the beginning of something."""


def may_end_early(script: str, line: int) -> bool:
    """Whether the `for` in a line of a script may end before its loader does; so may what iterates without one."""
    for node in ast.walk(ast.parse(Path(script).read_bytes())):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or line):
            called = {getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node.iter)}
            return not called.isdisjoint(_CUTS) or any(map(_leaves, node.body))
    return True


def _leaves(node: ast.AST) -> bool:
    """Whether it leaves the loop; a flag alone is for trials (`if args.dry_run: break`)."""
    if isinstance(node, (ast.Break, ast.Return)):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute):
        return any(map(_leaves, node.orelse))
    return any(map(_leaves, ast.iter_child_nodes(node)))
