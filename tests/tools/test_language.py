"""Docstrings, comments and pages are in plain English, and the dotted names that docstrings quote exist.

Oracle: the text and the syntax trees of all tracked files. Files are parsed only if they contain a suspicious line.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

OPENINGS = (
    *("Of", "What", "That", "Those", "From", "Who", "Whom", "Whose", "With", "By", "In", "Into", "Between", "At", "As"),
    *("To", "Where", "Which", "Through", "Like", "Whoever", "There"),
)
"""Words that cannot begin a docstring, which must be a sentence or a noun phrase that stands on its own."""
WORDS = re.compile(r"\b(?:who|whoever|whom|somebody|nobody|anybody|everybody)\b", re.IGNORECASE)
"""Words in place of a concrete subject, such as a rank, a process, a launcher or a user."""
EXCEPTIONS: dict[str, tuple[str, ...]] = {}
"""Lines, by file, where such a word is data, e.g. the output of a program. Words in back-ticks need no exception."""
PACKAGES = frozenset({"horovod", "keras", "mlflow", "tensorflow"}) | sys.stdlib_module_names
"""Packages with the name of a folder or module of ours: what is in them is not checked, unless it may be ours."""

CODE = re.compile(r"^( *)(```+).*?^\1\2|`[^`]*`", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
SUFFIXES = ("py", "md", "sh", "txt", "cfg", "toml", "yaml", "json", "jsonl")


@functools.cache
def texts() -> dict[str, str]:
    """Return the texts of all tracked Python files, shell scripts and pages by their paths."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this copy of the repository has no history to list its files")
    command = ["git", "ls-files", "-z", "--", "*.py", "*.sh", "*.md"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name: (REPOSITORY / name).read_text() for name in listed if (REPOSITORY / name).is_file()}


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(texts()[path])


def docstrings(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings of a file, including those of fields."""
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value


def comments(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all comments of a Python file or shell script."""
    if path.endswith(".sh"):
        for number, line in enumerate(texts()[path].splitlines(), 1):
            if found := re.search(r"(?:^|\s)#(.*)", line):
                yield number, found[1]
        return
    for token in tokenize.generate_tokens(io.StringIO(texts()[path]).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(path: str) -> Iterator[tuple[int, str]]:
    """Yield pieces of a file's prose with the number of their first line."""
    if path.endswith(".md"):
        yield 1, texts()[path]
    else:
        yield from comments(path)
    if path.endswith(".py"):
        yield from docstrings(path)


def without_code(text: str) -> str:
    """Blank out code spans and blocks, and keep line breaks."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def report(found: list[str]) -> str:
    return f"{len(found)} places:\n" + "\n".join(sorted(found))


def test_docstrings_begin_with_a_verb_or_a_noun():
    suspicious = re.compile(rf"""^\s*[rR]?(?:\"{{1,3}}|'{{1,3}})\s*(?:{"|".join(OPENINGS)})\b""", re.MULTILINE)
    found = [
        f"{path}:{line}: {' '.join(words[:8])}"
        for path, text in texts().items()
        if path.endswith(".py") and suspicious.search(text)
        for line, docstring in docstrings(path)
        if (words := docstring.split()) and words[0] in OPENINGS
    ]
    assert not found, report(found)


def test_sentences_have_concrete_subjects():
    found = []
    for path, text in texts().items():
        if not WORDS.search(text):
            continue
        for first, piece in prose(path):
            lines = piece.splitlines()
            for match in WORDS.finditer(without_code(piece)):
                number = piece.count("\n", 0, match.start())
                if not any(excepted in lines[number] for excepted in EXCEPTIONS.get(path, ())):
                    found.append(f"{path}:{first + number}: {match[0]}: {lines[number].strip()[:90]}")
    assert not found, report(found)


@functools.cache
def places() -> dict[tuple[str, ...], set[str]]:
    """Return the paths of modules by each end of their path, split into names: ("disk",), ("files", "disk"), ...

    A folder has the path of its `__init__.py`, whether that exists or not.
    """
    found = defaultdict(set)
    for path in texts():
        if path.endswith(".py"):
            names = tuple(path.removesuffix(".py").split("/"))
            for end in range(1, len(names) + 1):
                for begin in range(end):
                    found[names[begin:end]].add(path if end == len(names) else "/".join(names[:end]) + "/__init__.py")
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module's or class's body, including those in blocks such as `if` and `try`."""
    for node in body:
        yield node
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def definitions(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return the nodes that define the names of a module or class."""
    found: dict[str, ast.AST] = {}
    for node in statements(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
        else:
            for part in ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.With)) else ():
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found[part.id] = node
    return found


def members(kind: ast.ClassDef) -> set[str]:
    """Return the names that a class and its methods define, without inherited ones."""
    assigned = (node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {*definitions(kind.body), *(node.attr for node in assigned)}


def inherits(kind: ast.ClassDef, path: str, name: str) -> bool:
    """Return whether a class may inherit a member: from a class of ours that has it, or from any other class."""
    for base in map(ast.unparse, kind.bases):
        node = definitions(tree(path).body).get(base)
        if isinstance(node, ast.ClassDef):
            found = name in members(node) or inherits(node, path, name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allstep."):
            found = not is_stale(f"{node.module}.{base}.{name}")
        else:
            found = base != "object"
        if found:
            return True
    return False


def defines(path: str, names: list[str]) -> bool:
    """Return whether a module defines `name` or `Class.member`, or `member` in one of its classes."""
    module = definitions(tree(path).body)
    first, *rest = names
    if first not in module:
        return any(first in members(node) for node in module.values() if isinstance(node, ast.ClassDef))
    node = module[first]
    return not (rest and isinstance(node, ast.ClassDef)) or rest[0] in members(node) or inherits(node, path, rest[0])


def is_stale(name: str) -> bool:
    """Return whether a dotted name begins with a folder or module of ours, and does not exist."""
    names = name.removeprefix("allstep.").split(".")
    known = places()
    if (names[0],) not in known or names[-1] in SUFFIXES:
        return False
    if names[0] in PACKAGES and not known.get(tuple(names[:2])):
        return False
    for end in range(len(names), 0, -1):
        for path in known.get(tuple(names[:end]), ()):
            if end == len(names) or (path in texts() and defines(path, names[end:])):
                return False
    return True


def variables(path: str) -> set[str]:
    """Return the names of a file's parameters and variables, which may be the names of modules as well."""
    nodes = list(ast.walk(tree(path)))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_names_in_docstrings_and_comments_exist():
    found = []
    for path, text in texts().items():
        if path.endswith(".py") and any(is_stale(name) for name in DOTTED.findall(text)):
            for first, piece in prose(path):
                for match in DOTTED.finditer(piece):
                    if is_stale(match[1]) and match[1].partition(".")[0] not in variables(path):
                        found.append(f"{path}:{first + piece.count(chr(10), 0, match.start())}: {match[1]}")
    assert not found, report(found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tools.test_language", False),
        ("test_language.is_stale", False),
        ("test_language.is_fresh", True),
        ("tools.test_tongue", True),
        ("elsewhere.is_stale", False),
        ("train.py", False),
    ],
)
def test_the_search_for_names(name, expected):
    assert is_stale(name) == expected


def test_asserts_assign_nothing():
    """PYTHONOPTIMIZE leaves asserts out."""
    sources = [path for path in texts() if path.endswith(".py") and not path.startswith("tests/")]
    asserts = [(path, node) for path in sources for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    found = [
        f"{path}:{node.lineno}"
        for path, node in asserts
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
    ]
    assert asserts and not found, report(found)
