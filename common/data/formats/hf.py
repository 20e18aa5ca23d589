"""hf:DIR: a data set of Hugging Face's `datasets`, saved by `save_to_disk`, and read by pyarrow alone.

DIR holds *.arrow, or a folder of them a split: train, and validation or test. `datasets` itself need not be installed.
"""

from __future__ import annotations

from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.arrow_table import load_tables
from allstep.common.data.formats.parts import find_parts
from allstep.common.data.images.encoded import require

# What `map` and `filter` have left beside the data set.
_CACHE = "cache-"


def prepare(config: DataConfig) -> None:
    """Looks at the tables as `load` does, so that a mistake is reported by one rank alone."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """Maps the tables into memory."""
    require("pyarrow", "pyarrow", config)
    return load_tables(config, *find_parts(config, (".arrow",), leftovers=(_CACHE,)))
