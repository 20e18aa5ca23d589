"""Rules for all programs in benchmarks/. Oracle: their source."""

from __future__ import annotations

import ast

from ranks import REPOSITORY

SOURCES = {path: ast.parse(path.read_text()) for path in sorted((REPOSITORY / "benchmarks").rglob("*.py"))}


def test_every_figure_comes_from_the_runner():
    """`benchmarks/runner.py` alone parses flags, prints tables and exits; tools/gpu_check.sh is its own."""
    parsers = {
        str(path.relative_to(REPOSITORY / "benchmarks"))
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Parser", "argparse.ArgumentParser", "print_table")
    }
    others = {"handwritten/data.py", "gpu/check.py", "gpu/decode.py"}
    assert parsers == {"runner.py", "forecast_fit.py", "reproducibility.py", *others}


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
    assert several == ["benchmarks/handwritten/data.py: '--synthetic-shape'"]
