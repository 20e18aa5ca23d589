"""The training command line: flags, and a YAML file of them given by `--config`; flags win over the file."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from allstep.common import config_file
from allstep.common.config import TrainConfig
from allstep.common.errors import UserError
from allstep.common.flags import Kind, Parser, nonempty_path, nonempty_text, one_of, wrong
from allstep.common.launcher import Placement
from allstep.common.signs import default_strategy
from allstep.common.validation import validate


def parse(strategies: Sequence[str], place: Placement, argv: Sequence[str] | None = None) -> TrainConfig:
    """Read a run's configuration from the command line of this process, or from `argv`.

    Args:
        strategies: names of the framework's strategies; the choice is made by `place` where the user makes none.
        place: rank 0 alone prints the help text.

    Raises:
        UserError: a flag, its value or the YAML file is wrong.
        SystemExit: with status 0, after --help.
    """
    flags = {flag.name: flag for flag in flags_of(TrainConfig)}
    parser = _parser(flags.values(), strategies)
    with contextlib.redirect_stdout(None if place.rank else sys.stdout):
        given = vars(parser.parse_args(list(map(_with_hyphens, sys.argv[1:] if argv is None else argv))))
    values: dict[str, object] = {}
    for path in given.pop("config", []):
        for entry in config_file.read(path, flags):
            values[entry.key] = _value(flags[entry.key], entry.words, str(entry))
    if {"batch-size", "global-batch-size"} & given.keys():  # two ways to say one thing: the file's gives way
        values = {name: value for name, value in values.items() if name not in ("batch-size", "global-batch-size")}
    for name, words in given.items():
        values[name] = words if isinstance(words, bool) else _value(flags[name], words, f"--{name}")
    config = _build(TrainConfig, values)
    if config.strategy is None:
        config = dataclasses.replace(config, strategy=default_strategy(place))
    validate(config, strategies, place)
    return config


@dataclass(frozen=True)
class Flag:
    """A field of the configuration as a flag."""

    name: str
    """Without the hyphens before it."""
    kind: Kind
    """Of one value."""
    num_values: int | None
    """None for any number."""
    metavar: str
    """What stands for a value in the help text."""
    default: object
    group: type
    """The dataclass of the field."""


def flags_of(group: type) -> Iterable[Flag]:
    """The fields of a configuration and of those within it, one after the other."""
    hints = get_type_hints(group, include_extras=True)
    for item in dataclasses.fields(group):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint)
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        yield Flag(item.name.replace("_", "-"), *_kind(hint), default, group)


def _kind(hint: Any) -> tuple[Kind, int | None, str]:
    """The type of a field's values, how many it has, and what stands for one in the help text."""
    kind, num_values = None, 1
    if get_origin(hint) is Annotated:
        hint, kind = get_args(hint)
    if type(None) in get_args(hint):
        [hint] = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint)), 1, _choice(get_args(hint))
    if get_origin(hint) is tuple:
        hint, *others = get_args(hint)
        num_values = None if others == [Ellipsis] else 1 + len(others)
    return kind or _KINDS[hint], num_values, _METAVARS[hint]


def _choice(names: Sequence[str]) -> str:
    return f"{{{','.join(names)}}}"


def _truth(word: str) -> bool:
    if word.lower() not in _TRUTHS:
        raise wrong("to be true or false", word, "write one of them")
    return _TRUTHS[word.lower()]


_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Not int and float: each number says in its field how large it may be.
_KINDS: Mapping[type, Kind] = {bool: _truth, str: nonempty_text, Path: nonempty_path}
_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _value(flag: Flag, words: Sequence[str], name: str) -> object:
    """The value that a flag has by these words, where the message of a mistake calls it `name`."""
    try:
        if flag.num_values not in (None, len(words)):
            received = f"{len(words)} values" if len(words) != 1 else "1 value"
            many = f"{flag.num_values} values" if flag.num_values != 1 else "one value"
            raise wrong(f"to be {many}", received, "see --help")
        values = tuple(map(flag.kind, words))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"expected {name} {error}") from None
    return values[0] if flag.num_values == 1 else values


def _build(group: type, values: Mapping[str, object]) -> Any:
    """A configuration with the values of its flags by name, and defaults for all others."""
    hints, chosen = get_type_hints(group), {}
    for item in dataclasses.fields(group):
        name = item.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[item.name]):
            chosen[item.name] = _build(hints[item.name], values)
        elif name in values:
            chosen[item.name] = values[name]
    return group(**chosen)


def _with_hyphens(word: str) -> str:
    """A flag may be written as the key in a YAML file may be: --base_lr."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _parser(flags: Iterable[Flag], strategies: Sequence[str]) -> Parser:
    parser = Parser(None, _DESCRIPTION, usage="%(prog)s [--FLAG VALUE ...]", argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", action="append", type=nonempty_path, metavar="FILE.yaml", help="a file of flags")
    groups: dict[type, Any] = {}
    for flag in flags:
        if flag.group not in groups:
            title = inspect.getdoc(flag.group).rstrip(".")
            groups[flag.group] = parser.add_argument_group(title)
        group = groups[flag.group]
        documentation = _documentation(flag.group.__module__)[flag.group.__name__][flag.name]
        help_text = documentation + _default_in_help(flag.default)
        options: dict[str, Any] = {"dest": flag.name, "help": help_text.replace("%", "%%")}
        if isinstance(flag.default, bool):
            group.add_argument(f"--{flag.name}", action=argparse.BooleanOptionalAction, **options)
            continue
        metavar = _choice(strategies) if flag.name == "strategy" else flag.metavar
        nargs = 1 if flag.num_values == 1 else "*"
        group.add_argument(f"--{flag.name}", action="store", nargs=nargs, metavar=metavar, **options)
    return parser


def _default_in_help(default: object) -> str:
    if default is None or default == ():
        return ""
    plain = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f" (default: {'on' if default is True else 'off' if default is False else plain})"


_DESCRIPTION = "Train a network. Flags may also stand in a YAML file: --config FILE.yaml; flags win over the file."


@functools.cache
def _documentation(module: str) -> dict[str, dict[str, str]]:
    """What stands below each field of the dataclasses of a module, by the names of class and flag."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        group.name: {
            field.target.id.replace("_", "-"): " ".join(below.value.value.split())
            for field, below in pairwise(group.body)
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
        }
        for group in tree.body
        if isinstance(group, ast.ClassDef)
    }
