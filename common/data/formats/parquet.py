"""parquet:DIR: tables in Parquet files, whose relevant columns are unpacked once per host.

Reading one row of a Parquet file unpacks all rows around it. So the rows are written to Arrow files in --data-dir,
which ranks map into memory and read in any order.
"""

import functools
from pathlib import Path
from typing import Any

from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset
from allstep.common.data.datasets.files import derive_once, derived, derived_file
from allstep.common.data.formats.arrow_table import arrow_errors, load_tables
from allstep.common.data.formats.parts import choose_fields, find_parts
from allstep.common.data.images.encoded import require
from allstep.common.data.passed_over import PassedOver
from allstep.common.files.disk import regular, write_atomically

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 2**26
_SUFFIXES = (".parquet",)
_COMPANIONS = "_SUCCESS|_metadata|_common_metadata|README.md"
"""Files beside tables that Spark and Hugging Face's hub write."""


def prepare(config: DataConfig) -> None:
    """Unpack the files, unless another run has done so.

    Raises UserError if pyarrow is not installed, there are no files, or one is damaged or lacks a column.
    """
    require("pyarrow", "pyarrow", config)
    import pyarrow.parquet as parquet

    passed = PassedOver()
    for paths in find_parts(config, _SUFFIXES, passed, companions=_COMPANIONS):
        for path in paths:
            with arrow_errors(path):
                if path == paths[0]:
                    with open(path, "rb", opener=regular) as source:
                        choose_fields(parquet.read_schema(source).names, config, str(path), passed)
                derive_once(_target(path, config), functools.partial(_unpack, path, config))
    passed.tell(config.dataset)


def load(config: DataConfig) -> Dataset:
    """Map the files that `prepare` has unpacked.

    Raises UserError if an unpacked file is missing, and as `load_tables` does.
    """
    require("pyarrow", "pyarrow", config)
    train, validation = find_parts(config, _SUFFIXES, PassedOver(), companions=_COMPANIONS)
    unpacked = ([derived(_target(path, config)) for path in paths] for paths in (train, validation))
    return load_tables(config, *unpacked)


def _target(path: Path, config: DataConfig) -> Path:
    return derived_file([path], config, ".arrow")


def _unpack(path: Path, config: DataConfig, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with open(path, "rb", opener=regular) as source, parquet.ParquetFile(source) as file:
        names, label = choose_fields(file.schema_arrow.names, config, str(path), PassedOver())
        columns = list(dict.fromkeys((*names, label)))
        fields = [file.schema_arrow.field(name) for name in columns]
        schema = pa.schema(fields, file.schema_arrow.metadata)
        with write_atomically(target) as stream, pa.ipc.new_file(stream, schema) as writer:
            for batch in file.iter_batches(_rows_at_once(file.metadata), columns=columns):
                writer.write_batch(batch.select(columns))


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows fit into `_BYTES_AT_ONCE`, by the group with the largest rows; images take megabytes."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, largest)))
