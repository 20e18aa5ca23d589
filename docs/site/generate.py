"""Pages of the site that are written from the code at every build: flags, commands, and the repository's own pages.

`docs/conf.py` calls `write`; the pages lie in docs/generated, which git ignores.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import variables

from allstep.commands.cli import COMMANDS, call
from allstep.common.config import train_config
from allstep.common.process.environment import restored_environment

REPOSITORY = Path(__file__).resolve().parents[2]
REPOSITORY_PAGES = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "hostfiles/README.md": "hostfiles.md",
}
"""Pages outside docs/ and their names in docs/generated."""
SUBCOMMANDS = {"horovod": ("install", "check")}


def write(folder: Path) -> None:
    """Write all generated pages into a folder; a page whose text is unchanged keeps its time, so Sphinx skips it."""
    folder.mkdir(exist_ok=True)
    pages = {"all-flags.md": flags_page(), "commands.md": commands_page(), "variables.md": variables.page()}
    pages |= {name: repository_page(path) for path, name in REPOSITORY_PAGES.items()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def repository_page(path: str) -> str:
    """Return a page of the repository with its links as seen from docs/generated."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], os.path.normpath(Path(path).parent / match[2]), match[3] or ""
        if target.startswith("docs/"):
            return f"[{text}](../{target.removeprefix('docs/')}{anchor})"
        return f"[{text}]({REPOSITORY_PAGES[target]}{anchor})" if target in REPOSITORY_PAGES else f"`{text}`"

    return re.sub(r"\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)", link, (REPOSITORY / path).read_text())


def flags_page() -> str:
    """Return the page of all flags of the trainers, one table a group, from the fields of `TrainConfig`."""
    lines = [
        "# All flags",
        "",
        "This reference lists every flag of both trainers, written from their definitions when the site is built.",
        "[Flags](../flags.md) explains the main ones. A list takes several words, as in `--lr-milestones 30 60`;",
        "`--no-FLAG` switches a flag off, also one that a file given by `--config` switches on.",
    ]
    for group in groups():
        lines += ["", f"## {title(group)}", "", inspect.cleandoc(group.__doc__ or ""), ""]
        lines += ["| flag | values | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [row(group, name) for name in meanings(group)]
    return "\n".join(lines) + "\n"


def groups() -> Iterator[type]:
    """Yield the dataclasses whose fields are flags, in the order of --help."""
    hints = get_type_hints(train_config.TrainConfig)
    yield train_config.TrainConfig
    yield from (hint for hint in hints.values() if dataclasses.is_dataclass(hint))


def title(group: type) -> str:
    """Return the heading of a group of flags."""
    return {"TrainConfig": "Network and run"}.get(group.__name__, group.__name__.removesuffix("Config"))


def row(group: type, name: str) -> str:
    """Return the row of one flag."""
    hint = get_type_hints(group)[name]
    field = next(field for field in dataclasses.fields(group) if field.name == name)
    cells = (f"`--{name.replace('_', '-')}`", values(hint), default(field), meanings(group)[name])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def values(hint: Any) -> str:
    """Describe the values that a flag of this type takes."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list: {values(kinds[0])}"
    names = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}
    return names[kinds[0]] if kinds[0] in names else values(kinds[0])


def default(field: dataclasses.Field[Any]) -> str:
    """Return a flag's default as it would be typed."""
    if callable(field.default_factory):
        return f"`{str(field.default_factory()).replace(str(Path.home()), '~')}`"
    value = field.default
    if value in (None, ()):
        return ""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"`{value}`"


def meanings(group: type) -> dict[str, str]:
    """Return the docstrings of a dataclass' fields, each in one line."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = escape(" ".join(ast.literal_eval(text.value).split()))
    return found


def escape(text: str) -> str:
    """Return plain text with Markdown's signs escaped, and pages that it names as links."""
    text = re.sub(r"([*_<>\[\]`])", r"\\\1", text)
    return re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", text)


def commands_page() -> str:
    """Return the page of all commands with what their --help prints."""
    lines = [
        "# All commands",
        "",
        "This reference is what `--help` prints, written when the site is built. [Statuses](../statuses.md) says how",
        "commands end. [All flags](all-flags.md) lists the flags of the trainers.",
    ]
    for words in ((), *((name,) for name in COMMANDS)):
        lines += section(words, level=2)
        for subcommand in SUBCOMMANDS.get(" ".join(words), ()):
            lines += section((*words, subcommand), level=3)
    return "\n".join(lines) + "\n"


def section(words: tuple[str, ...], *, level: int) -> list[str]:
    """Return the lines about one command."""
    return ["", f"{'#' * level} {' '.join(('allstep', *words))}", "", "```text", help_text(words), "```"]


def help_text(words: tuple[str, ...]) -> str:
    """Return what `allstep WORDS --help` prints in a terminal of 100 columns, in this process."""
    output = io.StringIO()
    with restored_environment(), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        os.environ["COLUMNS"] = "100"
        call([*words, "--help"])
    return output.getvalue().rstrip()
