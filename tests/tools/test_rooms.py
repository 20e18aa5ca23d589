"""Rooms of the source import in one direction (ARCHITECTURE.md). Oracle: the import statements."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# From bottom to top: each room of common/ imports only rooms before it.
ROOMS = [
    "base",
    "files",
    "launch",
    "process",
    "catalog",
    "config",
    "data",
    "recipe",
    "checkpoint",
    "reporting",
    "exact",
    "watch",
    "cli",
    "training",
    "api",
]


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that importing a module, or calling its functions, imports from allstep."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allstep."):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix("allstep.")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("allstep.")]
            yield from (name.removeprefix("allstep.") for name in names)
        yield from runtime_imports(node)


def imports_between_rooms(top: str) -> dict[str, dict[str, list[str]]]:
    """Map each room of `top` to the rooms and folders that it imports, with the files that do."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((REPOSITORY / top).glob("*/**/*.py")):
        room = path.relative_to(REPOSITORY / top).parts[0]
        for name in runtime_imports(ast.parse(path.read_text())):
            folder, *rest = name.split(".")
            target = rest[0] if folder == top and rest else folder
            if target != room:
                found[room][target].append(f"{path.relative_to(REPOSITORY)} imports {name}")
    return found


def test_common_has_rooms_alone():
    assert [path.name for path in (REPOSITORY / "common").glob("*.py")] == ["__init__.py"]
    rooms = {path.parent.name for path in (REPOSITORY / "common").glob("*/*.py")}
    assert rooms == set(ROOMS)


def test_rooms_of_common_import_only_rooms_before_them():
    wrong = [
        line
        for room, targets in imports_between_rooms("common").items()
        for target, lines in targets.items()
        if target not in ROOMS[: ROOMS.index(room)]
        for line in lines
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_import_each_other_without_circles():
    graph = {room: set(targets) for room, targets in imports_between_rooms("commands").items()}
    assert graph["compare"] >= {"shared", "common"}  # the search finds imports
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"commands import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_frameworks_import_neither_commands_nor_each_other(framework):
    files = sorted((REPOSITORY / framework).rglob("*.py"))
    names = {name.split(".")[0] for path in files for name in runtime_imports(ast.parse(path.read_text()))}
    assert names == {"common", framework}
