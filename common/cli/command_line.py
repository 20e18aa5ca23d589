"""Command line of the trainers: flags, and a YAML file of flags given by `--config`; flags win over the file.

tyro makes flags and their help texts from the fields of `TrainConfig`. The types of `flag_types.py` parse the words of
a flag, so a mistake has the same error message on the command line, in the file, and in the commands of `allstep`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from allstep.common.base.compat import flag_names
from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import Kind, Parser, flag_name, nonempty_path, nonempty_text, one_of, wrong
from allstep.common.cli import config_file
from allstep.common.cli.validation import validate
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import Placement
from allstep.common.launch.unclaimed_ranks import default_strategy

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo


def parse(strategies: Sequence[str], placement: Placement, argv: Sequence[str] | None = None) -> TrainConfig:
    """Read a run's configuration from the command line of this process, or from `argv`.

    Raises UserError if a flag, its value or the YAML file is wrong; SystemExit with status 0 after --help.

    Args:
        strategies: names of the framework's strategies.
        placement: decides the strategy if the user gives none. Only rank 0 prints the help text.
    """
    import tyro

    defaults = _defaults()
    parser = Parser(None, _DESCRIPTION, add_help=False)
    parser.add_argument("--config", action="append", type=nonempty_path, default=[])
    given, words = parser.parse_known_args(argv)
    entries = read_files(given.config)
    for word in words:
        written, equals, value = word.partition("=")
        name = flag_name(word)
        if name in ("batch-size", "global-batch-size"):  # either one overrides both of the file
            entries.pop("batch-size", None)
            entries.pop("global-batch-size", None)
        if name and name.startswith("tyro-"):  # these write shell completions, and fail with assertions on wrong values
            parser.refuse(word, ())
        if equals and isinstance(defaults.get(name or ""), bool):
            parser.error(f"expected {written} alone, received it with the value {quote(value)}; leave that out")
    if shutil.get_terminal_size().columns < 20:  # tyro's help never ends in a terminal of 5 columns
        os.environ["COLUMNS"] = "20"
    try:
        config, unknown = tyro.cli(
            TrainConfig,
            prog=parser.prog,
            description=parser.description,
            args=words,
            return_unknown_args=True,
            console_outputs=placement.rank == 0,
            config=(tyro.conf.OmitArgPrefixes,),
            registry=_registry(parser, strategies, entries),
        )
    except BrokenPipeError:  # --help piped into a reader that has exited, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        raise SystemExit(0) from None
    if unknown:
        parser.refuse(unknown[0], ["--config", *map("--{}".format, defaults)])
    if config.strategy is None:
        config = dataclasses.replace(config, strategy=default_strategy(placement, strategies))
    validate(config, strategies, placement)
    return config


def parse_beside(parser: Parser, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command's own flags and words; return them and the trainers' flags, which may come before the words."""
    defaults, own, given = {**_defaults(), "config": None}, set(flag_names(parser)), list[str]()
    words, left = list[str](), list(sys.argv[1:] if argv is None else argv)
    while left:
        word = left.pop(0)
        name = flag_name(word)
        if name is None or word == "--" or word.partition("=")[0] in own:
            words.append(word)
            continue
        if name not in defaults:
            parser.refuse(word, [*own, *map("--{}".format, defaults)])
        default = defaults[name]
        count = 0 if "=" in word or isinstance(default, bool) else 1
        if isinstance(default, list) and count:  # as many values as the default has, or all up to the next flag
            count = len(default) or next((index for index, one in enumerate(left) if one.startswith("--")), len(left))
        given += [word, *left[:count]]
        del left[:count]
    flags, unknown = parser.parse_known_args(words)
    return flags, [*given, *unknown]


def read_files(paths: Iterable[Path]) -> dict[str, config_file.ConfigLine]:
    """Read files of --config and return their lines by flag name; for a flag in several files, the last one wins.

    Raises UserError if a file cannot be read, or is not a configuration.
    """
    names = _defaults()
    return {entry.key: entry for path in paths for entry in config_file.read(path, names)}


def _defaults() -> dict[str, Any]:
    return {"list-strategies": False, **TrainConfig().flat()}


_DESCRIPTION = "Train a network. Flags may also stand in a YAML file: --config FILE.yaml; flags win over the file."


def _registry(
    parser: Parser, strategies: Sequence[str], entries: Mapping[str, config_file.ConfigLine]
) -> ConstructorRegistry:
    """Return the rules by which tyro parses words with the types of `flag_types.py`; `entries` replace the defaults."""
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo, StructConstructorSpec

    registry = ConstructorRegistry()
    specs: dict[type, StructConstructorSpec | None] = {}  # tyro asks twice, and for its own rule by way of this one

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type):
            return None
        if info.type not in specs:
            specs[info.type] = None
            spec = ConstructorRegistry.get_struct_spec(info)
            assert isinstance(spec, StructConstructorSpec)  # tyro has one for every dataclass
            specs[info.type] = dataclasses.replace(spec, fields=tuple(map(flag, spec.fields)))
        return specs[info.type]

    # Only here is the flag's name known: a value constructor in a field's annotation does not see the field.
    def flag(field: StructFieldSpec) -> StructFieldSpec:
        if dataclasses.is_dataclass(field.type):
            return dataclasses.replace(field, helptext=None)  # the docstring of its class, without reading the source
        name = field.name.replace("_", "-")
        kind = _kind(field.type)
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(field.type, set()))
        assert isinstance(spec, tyro.constructors.PrimitiveConstructorSpec)  # fields are parsed from words
        num_values = spec.nargs if isinstance(spec.nargs, int) else None
        if name in entries:
            value = _value(kind, num_values, entries[name].words, str(entries[name]))
            field = dataclasses.replace(field, default=value)

        def from_words(words: Sequence[str]) -> object:
            if num_values == 1 and not words:
                parser.error(f"expected a value after --{name}, received none; give one")
            if num_values == 1 and len(words) > 1:
                parser.refuse(words[1], ())
            return _value(kind, num_values, words, f"--{name}")

        metavar = f"{{{','.join(strategies)}}}" if name == "strategy" else spec.metavar.removeprefix("{None}|")
        # from_words reports a wrong number of words or a wrong choice; tyro would print several lines and exit.
        spec = dataclasses.replace(spec, nargs="*", choices=None, metavar=metavar, instance_from_str=from_words)
        described = tyro.conf.arg(help_behavior_hint="" if field.default in (None, ()) else None)
        # tyro would import typeguard, a tenth of a second, to check the defaults of types that are no plain classes.
        annotated = Annotated[field.type if isinstance(field.type, type) else object, spec, described]

        written = field.helptext  # tyro reads the source when it shows help
        assert callable(written)
        return dataclasses.replace(field, type=annotated, helptext=lambda: " ".join((written() or "").split()))

    return registry


def _kind(hint: Any) -> Kind:
    """Return the parser for a field's values: the one in its `Annotated` hint, or else the one for the plain hint."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    return _KINDS[hint]


def _truth(word: str) -> bool:
    if word.lower() not in _TRUTHS:
        raise wrong("to be true or false", word, "write one of them")
    return _TRUTHS[word.lower()]


_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Without int and float: each number has its range in its field's annotation.
_KINDS: Mapping[Any, Kind] = {
    bool: _truth,
    str | None: nonempty_text,
    Path: nonempty_path,
    Path | None: nonempty_path,
}


def _value(kind: Kind, num_values: int | None, words: Sequence[str], name: str) -> object:
    """Return the value of a flag from its words; error messages call the flag `name`."""
    if num_values not in (None, len(words)):
        many = "one value" if num_values == 1 else f"{num_values} values"
        received = "1 value" if len(words) == 1 else f"{len(words)} values"
        raise UserError(f"expected {name} to be {many}, received {received}; see --help")
    try:
        values = tuple(map(kind, words))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"expected {name} {error}") from None
    return values[0] if num_values == 1 else values
