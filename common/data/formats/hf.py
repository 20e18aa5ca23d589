"""hf:DIR: a data set of Hugging Face's `datasets`, saved by `save_to_disk`.

DIR holds *.arrow files, or one folder of them per split: train, and validation or test. Only pyarrow is needed.
"""

from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.formats.arrow_table import load_tables
from allstep.common.data.formats.parts import find_parts
from allstep.common.data.images.encoded import require
from allstep.common.data.passed_over import PassedOver

_COMPANIONS = r"(dataset_info|state|dataset_dict)\.json"
"""Files of `save_to_disk` beside the tables."""


def prepare(config: DataConfig) -> None:
    """Check the tables as `load` does, so that only one rank reports a mistake."""
    load(config)


def load(config: DataConfig) -> Dataset:
    """Map the tables into memory."""
    require("pyarrow", "pyarrow", config)
    passed = PassedOver()
    tables = find_parts(config, (".arrow",), passed, companions=_COMPANIONS, leftovers="cache-")
    passed.tell(config.dataset)
    return load_tables(config, *tables)
