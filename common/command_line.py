"""The training command line: flags, and a YAML file of them given by `--config`; flags win over the file."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from allstep.common.config import TrainConfig
from allstep.common.errors import UserError
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
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    described = tyro.conf.arg(help_behavior_hint="")
    parsed = Annotated[TrainConfig, described, tyro.conf.OmitArgPrefixes]
    arguments = _with_config_file(argv)
    answer, mistake = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(mistake):
            config = tyro.cli(parsed, args=arguments, description=_DESCRIPTION)
    except SystemExit as end:
        if end.code == 0:
            if place.rank == 0:
                print(answer.getvalue(), end="")
            raise
        raise UserError(_one_line(mistake.getvalue())) from None
    if config.strategy is None:
        config = dataclasses.replace(config, strategy=default_strategy(place))
    validate(config, strategies)
    return config


_DESCRIPTION = "Train a network. Flags may also stand in a YAML file: --config FILE.yaml; flags win over the file."


def _with_config_file(argv: list[str]) -> list[str]:
    """Replace `--config FILE` by the file's content as flags in front, where later ones override them."""
    rest: list[str] = []
    from_file: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        path = value if equals else next(arguments, None)
        if not path:
            raise UserError("expected a YAML file after --config, received nothing; name one as in --config run.yaml")
        from_file += _flags_from_yaml(Path(path))
    given = {argument.partition("=")[0] for argument in rest}
    if given & {"--batch-size", "--global-batch-size"}:  # two ways to say one thing: the file's gives way
        from_file = _without(from_file, {"--batch-size", "--global-batch-size"})
    return from_file + rest


def _without(flags: list[str], names: set[str]) -> list[str]:
    return [flag for i, flag in enumerate(flags) if flag not in names and (i == 0 or flags[i - 1] not in names)]


def _flags_from_yaml(path: Path) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"expected a readable YAML file for --config, received {path}: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"expected `flag: value` lines in {path}, received {type(content).__name__}; see --help for the flags"
        )
    flags: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _one_line(panel: str) -> str:
    """The message of one of tyro's panels: a title, a rule, the message, a rule, hints."""
    sections = re.split(r"^\s*-{9,}\s*$", panel, flags=re.MULTILINE)
    return f"{' '.join(sections[1 if len(sections) > 1 else 0].split())} (--help lists all flags)"
