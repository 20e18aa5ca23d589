"""hf:DIR: a data set of Hugging Face's `datasets`, saved by `save_to_disk`.

DIR holds *.arrow files, or one folder of them per split: train, and validation or test. Only pyarrow is needed.
"""

from __future__ import annotations

from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.arrow_table import load_tables
from allstep.common.data.formats.parts import find_parts
from allstep.common.data.images.encoded import require

# Prefix of cache files that `map` and `filter` leave next to the data set.
_CACHE = "cache-"


def prepare(config: DataConfig) -> None:
    """Check the tables as `load` does, so that only one rank reports a mistake."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """Map the tables into memory."""
    require("pyarrow", "pyarrow", config)
    return load_tables(config, *find_parts(config, (".arrow",), leftovers=(_CACHE,)))
