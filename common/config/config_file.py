"""The YAML file of `--config`: lines of `flag: value`, taken as the words that would stand on the command line.

Nothing in the file is computed: values are scalars, or lists of them, and stay the text that they are. So YAML's own
ideas of numbers (010 is 8, 5:2 is 302), dates, tags and merged mappings do not matter, and a file of a few lines that
stand for billions costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.common.files.regular_file import read_regular
from allstep.common.process.errors import UserError, shown

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 2**16
"""Ten times what all flags take with a comment each; a second for PyYAML."""


@dataclass(frozen=True)
class ConfigLine:
    """A flag in a file."""

    path: Path
    line: int
    """From 1."""
    key: str
    """The flag's name, without the hyphens before it."""
    words: list[str]
    """As they would stand after the flag on the command line."""

    def __str__(self) -> str:
        return f"{shown(self.key)} in {shown(self.path)}, line {self.line},"


def read(path: Path, names: Collection[str]) -> list[ConfigLine]:
    """The flags in a file, in its order; those without a value, or with null, are left out.

    Args:
        names: of all flags that there are.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes every scalar for text, but for nothing at all."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag == f"{_YAML}null"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        root = yaml.compose(read_regular(path, most=MAX_BYTES).decode(), Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _unreadable(f"{shown(path)}{line}", " ".join(str(error.problem or error.context).split())) from None
    except RecursionError:
        raise _unreadable(shown(path), "It is nested too deeply") from None
    except OSError as error:
        raise _unreadable(shown(path), error.strerror) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(shown(path), " ".join(str(error).split())) from None
    if not isinstance(root, yaml.MappingNode):
        received = "a list" if isinstance(root, yaml.SequenceNode) else "text" if root else "nothing"
        raise UserError(
            f"expected lines of `flag: value` in {shown(path)}, received {received}; see --help for the flags"
        )
    return list(_entries(path, root, names))


def _unreadable(where: str, reason: str | None) -> UserError:
    return UserError(f"expected a readable YAML file for --config, received {where}: {reason}; mend it or name another")


_YAML = "tag:yaml.org,2002:"


def _entries(path: Path, root: yaml.MappingNode, names: Collection[str]) -> Iterator[ConfigLine]:
    lines: dict[str, int] = {}
    for key_node, value in root.value:
        line = key_node.start_mark.line + 1
        if not _is_text(key_node):
            raise UserError(f"expected flags in {shown(path)}, received {_what(key_node)} in line {line}; name one")
        entry = ConfigLine(path, line, key_node.value.replace("_", "-"), [])
        if entry.key not in names:
            near = difflib.get_close_matches(entry.key, names, n=1)
            advice = f"did you mean {near[0]}?" if near else "see --help for the flags"
            raise UserError(f"expected flags in {shown(path)}, received {shown(entry.key)} in line {line}; {advice}")
        if entry.key in lines:
            raise UserError(
                f"expected each flag once in {shown(path)}, received {shown(entry.key)} in lines "
                f"{lines[entry.key]} and {line}; leave one of them out"
            )
        lines[entry.key] = line
        if _is(value, "null"):
            continue
        for node in value.value if _is(value, "seq") else [value]:
            if not _is_text(node):
                raise UserError(f"expected {entry} to be a value or a list of them, received {_what(node)}; see --help")
            entry.words.append(node.value)
        yield entry


def _is(node: yaml.Node, kind: str) -> bool:
    """Whether a node is of one of YAML's own kinds, and not made so by a tag."""
    import yaml

    kinds = {"seq": yaml.SequenceNode, "map": yaml.MappingNode}
    return node.tag == f"{_YAML}{kind}" and isinstance(node, kinds.get(kind, yaml.ScalarNode))


def _is_text(node: yaml.Node) -> bool:
    return _is(node, "str")


def _what(node: yaml.Node) -> str:
    """What a node is that is no text."""
    found = [name for kind, name in (("null", "nothing"), ("seq", "a list"), ("map", "a mapping")) if _is(node, kind)]
    return found[0] if found else f"the tag {shown(node.tag)}"
