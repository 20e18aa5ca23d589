"""Strict parser for untrusted YAML: limited size and depth, no aliases, and every key once."""

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from allstep.common.base.errors import quote
from allstep.common.files.disk import read_regular


def load(path: Path, *, maximum: int) -> Any:
    """Return the content of a YAML file of at most `maximum` bytes.

    Raises OSError if the file cannot be read, is too large, or is not a regular file; ValueError if it is not UTF-8, or
    as `parse` does.
    """
    return parse(read_regular(path, maximum=maximum).decode())


def parse(text: str) -> Any:
    """Return the content of a YAML text.

    Raises ValueError if it is not YAML, is nested too deeply, has a key twice, or has aliases, by which a few lines
    could expand to billions.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ComposerError(None, None, f"the alias *{event.anchor}", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            again = next(index for index, key in enumerate(keys) if key in keys[:index])
            raise ConstructorError(None, None, f"{quote(keys[again])} twice", node.value[again][0].start_mark)
        return found
