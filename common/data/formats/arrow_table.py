"""Samples in Apache Arrow tables, memory-mapped without copies; shared by hf: and parquet:."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.common.base.errors import UserError, quote, summary
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset, hold_out
from allstep.common.data.formats.arrays import inputs_of, joined, targets_of
from allstep.common.data.formats.labels import check_name
from allstep.common.data.formats.parts import choose_fields
from allstep.common.data.formats.task_inference import describe
from allstep.common.data.images.decoding import UnreadableImage
from allstep.common.data.images.encoded import MEAN, STD, encoded_splits, prepare_decoding
from allstep.common.data.passed_over import PassedOver
from allstep.common.files import strict_json
from allstep.common.files.disk import Unchanged, check_memory, regular

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_FORMAT = b"ARROW1"
"""First bytes of Arrow's file format; the stream format begins differently."""


@contextmanager
def arrow_errors(where: object) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into a UserError that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # errors of the disk; pyarrow's own have no errno
            raise
        raise UserError(
            f"expected a whole table in {where}, received something else: {summary(error)}; write it again"
        ) from error


def load_tables(config: DataConfig, train: Sequence[Path], validation: Sequence[Path]) -> Dataset:
    """Load the data set in Arrow files; without validation files, hold out a share of the training samples.

    Raises UserError if a file is damaged, a column is missing or has an unsupported type, and as `describe` does.
    """
    parts = (train, f"the training part of {config.dataset}"), (validation, f"the validation part of {config.dataset}")
    passed = PassedOver()
    tables = [_open(paths, config, where, passed) for paths, where in parts if paths]
    passed.tell(config.dataset)
    first, last = tables[0], tables[-1]
    scale = None
    if isinstance(first, ArrowImages):
        assert isinstance(last, ArrowImages)  # both parts have images
        prepare_decoding(config)
        splits = encoded_splits(first, last, config)
        scale = MEAN, STD
    else:
        assert isinstance(last, ArrowNumbers)
        splits = first, last
    splits = hold_out(*splits, config, config.dataset, has_own=bool(validation))
    return describe(*splits, where=config.dataset, task=config.task, scale=scale)


def _open(paths: Sequence[Path], config: DataConfig, where: str, passed: PassedOver) -> ArrowImages | ArrowNumbers:
    import pyarrow as pa

    with arrow_errors(where):
        tables = [_mapped(path) for path in paths]
        files = MappedFiles(paths, tables)
        if any(table.schema != tables[0].schema for table in tables):
            check_memory(where, sum(table.nbytes for table in tables))  # int32 beside int64, ..., which are converted
        table = pa.concat_tables(tables, promote_options="permissive")
        names, target = choose_fields(table.column_names, config, where, passed)
        class_names, *others = {_class_names(table.schema, target): 0 for table in tables} or [()]
        if others:
            raise UserError(
                f"expected the same classes in all files of {where}, received {quote(', '.join(class_names))} and "
                f"{quote(', '.join(others[0]))}; write them alike"
            )
        for name in (*names, target):
            table.column(name).validate(full=True)  # the offsets in an untrusted file may point anywhere
        named = [f"{name} of {where}" for name in names]
        columns = [_plain(table.column(name), one) for name, one in zip(names, named, strict=True)]
        of_target = f"{target} of {where}"
        labels = np.concatenate(_values(_plain(table.column(target), of_target), of_target, text=True))
        targets = targets_of(labels, f"the targets of {where}")
        if len(columns) == 1 and _is_bytes(columns[0].type):
            images = ArrowImages(columns[0], targets, named[0], class_names, files)
            images.check(skip=config.skip_unreadable)
            images.fields = (*names, target)
            return images
        fields = list(map(_values, columns, named))
    if len(fields) > 1:
        fields = [[joined(list(map(np.concatenate, fields)), where)]]
    numbers = ArrowNumbers(fields[0], targets, where, class_names, files)
    numbers.fields = (*names, target)
    return numbers


def _class_names(schema: pa.Schema, target: str) -> tuple[str, ...]:
    """Return the names of the classes that Hugging Face's `datasets` keeps in the schema, if there are any."""
    try:
        features = strict_json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = features["info"]["features"][target]["names"]
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (strict_json.NotJson, KeyError, TypeError):  # from another program
        return ()


def _mapped(path: Path) -> pa.Table:
    import pyarrow as pa

    os.close(regular(path, os.O_RDONLY))  # mapping a FIFO would wait for a writer
    source = pa.memory_map(str(path))
    is_file = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    source.seek(0)
    reader: Any = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    batches, before = [], pa.total_allocated_bytes()
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        batches.append(batch)
        # Compressed batches are unpacked into memory, others stay in the file.
        check_memory(path, (pa.total_allocated_bytes() - before) // len(batches))
    return pa.Table.from_batches(batches, reader.schema)


def _is_bytes(kind: Any) -> bool:
    """Return whether values are bytes, or Hugging Face's image type: a struct of bytes and a path."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(f.name == "bytes" and (_is_bytes(f.type) or types.is_null(f.type)) for f in kind)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _plain(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Return a column without dictionaries (pandas' categories), and with decimal numbers as floating-point ones.

    Raises OSError if a dictionary's values, repeated for all rows, do not fit into memory.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        kind = column.type.value_type
        if _is_text(kind) or _is_bytes(kind):
            lengths = (_lengths(chunk.dictionary).take(chunk.indices) for chunk in column.chunks)
            check_memory(where, sum(length.sum().as_py() or 0 for length in lengths))
        column = column.cast(kind)
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _lengths(column: Any) -> Any:
    """Return the length of each text, or of each row's bytes."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if column.type in (pa.string_view(), pa.binary_view()):
        column = column.cast(pa.large_binary())
    return compute.call_function("binary_length", [column])


def _values(column: pa.ChunkedArray, where: str, *, text: bool = False) -> list[np.ndarray]:
    """Return a column of numbers, or of equally long lists of numbers, as one array (rows, ...) per chunk.

    With `text`, it may also be a column of strings.
    """
    if column.null_count:
        raise UserError(f"expected a value in each row of {where}, received {column.null_count} without; fill them")
    if text and _is_text(column.type):
        check_name(
            max((_lengths(chunk).to_numpy().max() for chunk in column.chunks if len(chunk)), default=0) // 4, where
        )
        return [np.asarray(column.to_pylist(), str)]
    arrays = [_array(chunk, where) for chunk in column.chunks if len(chunk)]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise _ragged(where)
    return arrays or [np.empty(0, np.int64)]


def _array(chunk: Any, where: str) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as compute

    shape, kind = [len(chunk)], chunk.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = compute.call_function("min_max", [compute.call_function("list_value_length", [chunk])])
        if lengths["min"] != lengths["max"]:
            raise _ragged(where)
        shape.append(lengths["max"].as_py())
        chunk = chunk.flatten()
        kind = chunk.type
        if chunk.null_count:
            raise UserError(f"expected a value in each place of {where}, received {chunk.null_count} nulls; fill them")
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        received = f"{kind} such as {quote(chunk[0].as_py())}" if _is_text(kind) and len(chunk) else str(kind)
        advice = "; paths of images are not opened: write the bytes of the files" * _is_text(kind)
        raise UserError(
            f"expected numbers, lists of them, or image files in {where}, received {received}; name another "
            f"column{advice}"
        )
    return chunk.to_numpy(zero_copy_only=False).reshape(shape)


def _ragged(where: str) -> UserError:
    return UserError(f"expected lists of one length in {where}, received several; give every row the same length")


class MappedFiles:
    """Files of a part in mapped memory, which must not change: a read beyond a shortened one ends in SIGBUS."""

    def __init__(self, paths: Sequence[Path], tables: Sequence[pa.Table]) -> None:
        self._files = [Unchanged(path) for path in paths]
        self._ends = np.cumsum([table.num_rows for table in tables])

    def check(self, indices: np.ndarray) -> None:
        """Raise UserError if a file with one of these rows has changed."""
        for number in set(np.searchsorted(self._ends, indices, side="right").tolist()):
            self._files[number].check()


class ArrowImages:
    """Column of image files; `encoded.EncodedImages` documents the methods."""

    fields: tuple[str, ...] = ()

    def __init__(
        self, column: pa.ChunkedArray, targets: np.ndarray, where: str, class_names: tuple[str, ...], files: MappedFiles
    ) -> None:
        import pyarrow as pa

        self.labels, self.where, self.class_names, self.files = targets, where, class_names, files
        self.column, self.paths = column, None
        if pa.types.is_struct(column.type):
            fields = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
            self.column, self.paths = fields["bytes"], fields.get("path")

    def check(self, *, skip: bool) -> None:
        """Refuse a table with a row without bytes, or without any bytes if unreadable images are skipped."""
        missing = self.column.null_count
        if not missing or (skip and missing < len(self.column)):
            return
        row = self.column.is_null().index(True).as_py()
        path = self.paths and self.paths[row].as_py()
        received = f"the path {quote(path)} without bytes" if path else "none"
        raise UserError(
            f"expected the bytes of an image in each row of {self.where}, received {received} in row {row} ({missing} "
            "such rows); write the content of the files into the table, or train on their folder by image-folder"
        )

    def content(self, index: int) -> bytes:
        self.files.check(np.array([index]))
        if (data := self.column[index].as_py()) is None:
            raise UnreadableImage("there are no bytes in it")
        return data

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        return _lengths(self.column).fill_null(0).to_numpy()[indices]

    def name(self, index: int) -> str:
        return f"{self.where}, row {index}"


class ArrowNumbers:
    """Columns of numbers, whose chunks are arrays in mapped memory.

    If the inputs are tokens, `inputs` has the smallest and largest token of each chunk, which `describe` needs.
    """

    parallel = False
    in_memory = True
    fields: tuple[str, ...] = ()

    def __init__(
        self,
        chunks: Sequence[np.ndarray],
        targets: np.ndarray,
        where: str,
        class_names: tuple[str, ...],
        files: MappedFiles,
    ) -> None:
        self.chunks, self.targets, self.where, self.class_names, self.files = chunks, targets, where, class_names, files
        self.ends = np.cumsum([len(chunk) for chunk in chunks])
        self.dtype = inputs_of(chunks[0][:0], where).dtype
        self.shape = chunks[0].shape[1:]
        if self.dtype == np.uint8 != chunks[0].dtype:
            for chunk in chunks:
                inputs_of(chunk, f"the inputs of {where}")  # pixels in another type are in range
        if self.dtype == np.int64 and len(self):
            self.inputs = np.array([(chunk.min(), chunk.max()) for chunk in chunks])

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        indices = np.asarray(indices)
        self.files.check(indices)
        inputs = np.empty((len(indices), *self.shape), self.dtype)
        numbers = np.searchsorted(self.ends, indices, side="right")
        places = indices - np.append(0, self.ends)[numbers]
        # Rows are copied one by one, which takes nearly as long in random order as in sequence. np.take on a table of
        # one chunk is 1.3 times as fast (1.8 times in sequence), np.concatenate 1.0 times (1.25 times in sequence).
        for row, (number, placement) in enumerate(zip(numbers.tolist(), places.tolist(), strict=True)):
            inputs[row] = self.chunks[number][placement]
        return inputs_of(inputs, f"the inputs of {self.where}", indices), self.targets[indices]
