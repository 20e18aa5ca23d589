"""Flags with which a run is evaluated: those of its data set and network, and those that the user gives.

A run directory is data: code that it names is imported only if the user names it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from allstep.common.api.session import words_of
from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import flag_name, flag_value
from allstep.common.catalog import user_file
from allstep.common.cli.validation import DATA_FLAGS
from allstep.common.config.data_config import DataConfig
from allstep.common.training.trained import Trained

_NETWORK = ("model", "model-args", "model-depth", "model-width", "loss", "precision", "seed")
_PICTURES = ("image-size", "exif-orientation", "validation-share")
_DATA = (
    *("dataset", "data-dir", "input-fields", "target-field", "task", "text-tokens", "validation-part"),
    *("synthetic-samples", "synthetic-shape", "synthetic-classes"),
)
"""Flags that another --dataset makes void."""


def words_for(trained: Trained, given: Sequence[str]) -> list[str]:
    """Return the words of a trainer's command line: the run's own flags, and `given`, which win.

    Raises UserError if the run names code, or an object of a program, that the user has not named.
    """
    names, config = set(map(flag_name, given)), trained.config
    kind = DataConfig(dataset=flag_value(given, "dataset") or str(config.get("dataset"))).kind
    pictures = [name for name in _PICTURES if kind in DATA_FLAGS[name.replace("-", "_")]]
    kept = (*_NETWORK, *pictures, *(() if "dataset" in names else _DATA))
    flags = {name: config[name] for name in kept if config.get(name) not in (None, [], False) and name not in names}
    for name in user_file.FLAGS:
        if flags.get(name) == user_file.PROGRAM:
            raise UserError(
                f"the --{name} of the run was an object of a program; name it in a file: --{name} FILE.py:NAME"
            )
    no_optimizer = {"momentum": 0.0} if "optimizer" not in names else {}
    return [*words_of({**user_file.trusted_flags(flags, given), **no_optimizer}), *given]
