"""Find out from the text of the script whether a loop ends after all batches of a loader, or may end earlier."""

from __future__ import annotations

import ast
from pathlib import Path

_CUTS = ("islice", "range", "take", "zip")
"""Functions and methods that iterate over only the beginning of something."""


def may_end_early(script: str, line: int) -> bool:
    """Return whether the `for` in a line of a script may end before its loader does; True if there is no `for`."""
    for node in ast.walk(ast.parse(Path(script).read_bytes())):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or line):
            called = {getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node.iter)}
            return not called.isdisjoint(_CUTS) or any(map(_leaves, node.body))
    return True


def _leaves(node: ast.AST) -> bool:
    """Return whether a node leaves the loop; a test of a mere flag does not count (`if args.dry_run: break`)."""
    if isinstance(node, (ast.Break, ast.Return)):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute):
        return any(map(_leaves, node.orelse))
    return any(map(_leaves, ast.iter_child_nodes(node)))
