"""Rules for all programs in benchmarks/. Oracle: their source."""

from __future__ import annotations

import ast

from ranks import REPOSITORY

SOURCES = {path: ast.parse(path.read_text()) for path in sorted((REPOSITORY / "benchmarks").rglob("*.py"))}


def test_every_main_has_one_signature():
    mains = [
        f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else None}"
        for tree in SOURCES.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    assert len(mains) > 20
    assert set(mains) == {"(argv: Sequence[str] | None=None) -> None"}


def test_flags_take_lists_with_commas():
    """Positional files may be several, and the trainers' --synthetic-shape takes three words."""
    several = [
        f"{path.relative_to(REPOSITORY)}: {ast.unparse(node.args[0])}"
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "nargs" and ast.literal_eval(node.args[0]).startswith("-")
    ]
    assert several == ["benchmarks/handwritten/blocks.py: '--synthetic-shape'"]
