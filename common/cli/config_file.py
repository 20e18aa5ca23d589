"""YAML file of `--config`: lines of `flag: value`, parsed like the same words on the command line.

Values are scalars or lists of scalars, and stay text. So YAML's rules for numbers (010 is 8, 5:2 is 302), dates, tags
and merged mappings do not apply, and a few lines of aliases that expand to billions cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.files.disk import read_regular

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 2**16
"""Size limit: ten times a file with all flags and a comment for each. PyYAML reads that much in a second."""


@dataclass(frozen=True)
class ConfigLine:
    """Flag in a configuration file."""

    path: Path
    line: int
    """Line number, from 1."""
    key: str
    """Flag name without the leading hyphens."""
    words: list[str]
    """Words that would follow the flag on the command line."""

    def __str__(self) -> str:
        return f"{quote(self.key)} in {quote(self.path)}, line {self.line},"


def read(path: Path, names: Collection[str]) -> list[ConfigLine]:
    """Return the flags in a file, in order, without those that have no value or null; `names` are all existing flags.

    Raises UserError if the file cannot be read, or is not a configuration.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that reads every scalar as text, except null."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag == f"{_YAML}null"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        root = yaml.compose(read_regular(path, maximum=MAX_BYTES).decode(), Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _unreadable(f"{quote(path)}{line}", " ".join(str(error.problem or error.context).split())) from None
    except RecursionError:
        raise _unreadable(quote(path), "It is nested too deeply") from None
    except OSError as error:
        raise _unreadable(quote(path), error.strerror) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(quote(path), " ".join(str(error).split())) from None
    if not isinstance(root, yaml.MappingNode):
        received = "a list" if isinstance(root, yaml.SequenceNode) else "text" if root else "nothing"
        raise UserError(
            f"expected lines of `flag: value` in {quote(path)}, received {received}; see --help for the flags"
        )
    return list(_entries(path, root, names))


def _unreadable(where: str, reason: str | None) -> UserError:
    return UserError(f"expected a readable YAML file for --config, received {where}: {reason}; fix it or name another")


_YAML = "tag:yaml.org,2002:"


def _entries(path: Path, root: yaml.MappingNode, names: Collection[str]) -> Iterator[ConfigLine]:
    lines: dict[str, int] = {}
    for key_node, value in root.value:
        line = key_node.start_mark.line + 1
        if not _is(key_node, "str"):
            raise UserError(f"expected flags in {quote(path)}, received {_what(key_node)} in line {line}; name one")
        entry = ConfigLine(path, line, key_node.value.replace("_", "-"), [])
        if entry.key not in names:
            advice = did_you_mean(entry.key, names, "see --help for the flags")
            raise UserError(f"expected flags in {quote(path)}, received {quote(entry.key)} in line {line}; {advice}")
        if entry.key in lines:
            raise UserError(
                f"expected each flag once in {quote(path)}, received {quote(entry.key)} in lines "
                f"{lines[entry.key]} and {line}; leave one of them out"
            )
        lines[entry.key] = line
        if _is(value, "null"):
            continue
        for node in value.value if _is(value, "seq") else [value]:
            if not _is(node, "str"):
                raise UserError(f"expected {entry} to be a value or a list of them, received {_what(node)}; see --help")
            entry.words.append(node.value)
        yield entry


def _is(node: yaml.Node, kind: str) -> bool:
    """Return whether a node is of a standard YAML kind, and not merely tagged as such."""
    import yaml

    kinds = {"seq": yaml.SequenceNode, "map": yaml.MappingNode}
    return node.tag == f"{_YAML}{kind}" and isinstance(node, kinds.get(kind, yaml.ScalarNode))


def _what(node: yaml.Node) -> str:
    """Describe a node that is not text."""
    found = [name for kind, name in (("null", "nothing"), ("seq", "a list"), ("map", "a mapping")) if _is(node, kind)]
    return found[0] if found else f"the tag {quote(node.tag)}"
