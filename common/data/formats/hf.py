"""hf:DIR: a data set of Hugging Face's `datasets`, saved by `save_to_disk`.

DIR holds *.arrow files, or one folder of them per split: train, and validation or test. Only pyarrow is needed.
`save_to_disk` names its files and splits in state.json and dataset_dict.json; others were left by an earlier data set
in the same folder, and are passed over.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.arrow_table import load_tables
from allstep.common.data.formats.parts import find_parts
from allstep.common.data.images.encoded import require
from allstep.common.data.passed_over import PassedOver
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular

_COMPANIONS = r"(dataset_info|state|dataset_dict)\.json"
"""Files of `save_to_disk` beside the tables."""
_MAX_BYTES = 2**24


def prepare(config: DataConfig) -> None:
    """Check the tables as `load` does, so that only one rank reports a mistake."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """Map the tables into memory."""
    require("pyarrow", "pyarrow", config)
    passed = PassedOver()
    tables = find_parts(
        config, (".arrow",), passed, companions=_COMPANIONS, left_over=partial(_left_over, cache(_read))
    )
    passed.tell(config.dataset)
    return load_tables(config, *tables)


def _left_over(read: Callable[[Path], dict], path: Path) -> str:
    """Return why a table's file is not part of the data set, or an empty text; `read` reads each JSON file once."""
    if path.name.startswith("cache-"):
        return "files cache-*, which other programs keep"
    state, splits = read(path.parent / "state.json"), read(path.parent.parent / "dataset_dict.json").get("splits")
    if state.get("_indices_data_files"):
        raise UserError(
            f"expected a data set without indices in {path.parent}, received one that an old version of datasets has "
            "saved with them; load it and save it again"
        )
    names = [one.get("filename") for one in state.get("_data_files") or [] if isinstance(one, dict)]
    is_other = (names and path.name not in names) or (splits and path.parent.name not in splits)
    return "files of an earlier data set" if is_other else ""


def _read(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        found = strict_json.loads(read_regular(path, maximum=_MAX_BYTES))
    except strict_json.NotJson as error:
        raise UserError(f"expected JSON in {quote(path)}, received {error}; save the data set again") from error
    return found if isinstance(found, dict) else {}
