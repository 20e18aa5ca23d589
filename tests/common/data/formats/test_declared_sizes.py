"""Headers that declare more than a file has are refused by name, before memory is allocated for them."""

from __future__ import annotations

import io
import os
import resource
import tarfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets
from allstep.common.data.formats.parquet import _rows_at_once
from allstep.common.data.sharding import curriculum_of
from allstep.common.files import array_json
from allstep.common.files.npy import load_npy

SIZES = (2**30, 2**47, 2**62)


@contextmanager
def little_memory():
    """Limit the address space, so that what a header declares cannot be allocated."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def npy(shape: tuple[int, ...], dtype: str = "|u1", content: bytes = bytes(64)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": shape, "fortran_order": False, "descr": dtype})
    return stream.getvalue() + content


def open_data(kind: str, path: Path) -> None:
    config = DataConfig(dataset=f"{kind}:{path}", data_dir=path.parent / "kept")
    datasets.prepare(config)
    datasets.load(config)


@pytest.mark.parametrize("shape", [*((size,) for size in SIZES), (2**40, 2**40), (-1,), (2, -(2**40))])
def test_npy(shape, tmp_path):
    (tmp_path / "values.json").write_text('{"__array__": 0}')
    for path in (tmp_path / "0.npy", tmp_path / "easy.npy"):
        path.write_bytes(npy(shape))
    with little_memory():
        with pytest.raises(ValueError, match="its header declares"):
            load_npy(npy(shape))
        with pytest.raises(UserError, match="received something else: its header declares"):
            array_json.load(tmp_path)
        with pytest.raises(UserError, match=r"received \S+easy.npy: its header declares .*; name another"):
            curriculum_of(DataConfig(curriculum=tmp_path / "easy.npy"), 3)


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 5), bool), np.asfortranarray(np.eye(3))]
)
def test_whole_npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    np.testing.assert_array_equal(load_npy(stream.getvalue()), array, strict=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz(size, packing, tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("x.npy", npy((size, 2)))
        archive.writestr("y.npy", npy((size,)))
    with (
        little_memory(),
        pytest.raises(UserError, match=rf"in {path}, received .*its header declares .*; write it again"),
    ):
        open_data("npz", path)
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("x.npy", npy((64,)))
        archive.filelist[0].file_size = min(size, 2**32 - 2)  # in the directory at the end, which is read first
    with little_memory(), pytest.raises(UserError, match=rf"in {path}, received .*declares .* bytes, packed into"):
        open_data("npz", path)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["a.npy", "a.cls"])
def test_npy_in_tar(name, size, tmp_path):
    contents = {"a.npy": npy((8, 8)), "a.cls": b"1"} | {name: npy((size,))}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for member, content in contents.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with little_memory(), pytest.raises(UserError, match=rf"in {tmp_path}/a.tar, a, {name}, .*its header declares"):
        open_data("webdataset", tmp_path)


@pytest.mark.parametrize("size", [*SIZES, 2**80])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE])
def test_tar_members(kind, size, tmp_path):
    info = tarfile.TarInfo("a.npy")
    info.size, info.type = size, kind
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with (
        little_memory(),
        pytest.raises(UserError, match=rf"tar archive in {tmp_path}/a.tar, received .*; write it"),
    ):
        open_data("webdataset", tmp_path)


def test_links_and_devices_are_counted(tmp_path, capsys):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(10):
            for name, content in ((f"{number}.npy", npy((8, 8))), (f"{number}.cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("null", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    open_data("webdataset", tmp_path)
    what = "links, devices and sparse files in archives: 3, such as link"
    warning = f"allstep: warning: webdataset:{tmp_path}: passed over {what}\n"
    assert capsys.readouterr().err == warning


def test_npz_that_is_encrypted_or_has_samples_without_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 0, 3), np.float32), y=np.arange(4))
    with pytest.raises(UserError, match=r"expected numbers in each sample of .*, received none: shape \(4, 0, 3\)"):
        open_data("npz", tmp_path / "a.npz")
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flags of a member, in both places
        content[content.find(mark) + offset] |= 1
    (tmp_path / "b.npz").write_bytes(content)
    with pytest.raises(UserError, match="received something else .*is encrypted, password required"):
        open_data("npz", tmp_path / "b.npz")


@pytest.mark.parametrize("packing", [None, "zstd"])
def test_arrow_batches_that_are_unpacked_into_memory(packing, tmp_path, monkeypatch):
    rows = pa.record_batch({"x": np.zeros(2**20, np.float32), "y": np.arange(2**20) % 2})
    options = pa.ipc.IpcWriteOptions(compression=packing)
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema, options=options) as writer:
        for _ in range(4):
            writer.write_batch(rows)
    monkeypatch.setattr("allstep.common.files.disk.available_memory", lambda: 2**22)
    if packing is None:
        open_data("hf", tmp_path)
        return
    with pytest.raises(UserError, match=rf"received {tmp_path}/a.arrow: expected at most 4194304 bytes, the memory"):
        open_data("hf", tmp_path)


def test_arrow_file_that_is_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "a.arrow")
    with pytest.raises(UserError, match=rf"received {tmp_path}/a.arrow: expected a regular file, received a FIFO"):
        open_data("hf", tmp_path)


def test_parquet_rows_of_megabytes_are_read_few_at_once(tmp_path):
    rows = pa.table({"x": [np.random.default_rng(row).bytes(2**22) for row in range(4)], "y": range(4)})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet", use_dictionary=False)
    assert 12 < _rows_at_once(pyarrow.parquet.read_metadata(tmp_path / "a.parquet")) <= 16
    pyarrow.parquet.write_table(rows.drop_columns("x"), tmp_path / "a.parquet")
    assert _rows_at_once(pyarrow.parquet.read_metadata(tmp_path / "a.parquet")) == 1024


@pytest.mark.parametrize("kind", ["parquet", "hf"])
@pytest.mark.parametrize("field", ["x", "label"])
def test_rows_of_a_dictionary(kind, field, tmp_path, monkeypatch):
    few = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([bytes(2**16)]))
    columns = {"x": pa.array(np.arange(1000.0)), "label": pa.array(np.arange(1000) % 3)}
    columns[field] = few if field == "x" else few.cast(pa.dictionary(pa.int32(), pa.string()))
    (tmp_path / "set").mkdir()
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / "set" / "a.parquet")
    else:
        with pa.ipc.new_file(str(tmp_path / "set" / "a.arrow"), pa.table(columns).schema) as writer:
            writer.write_table(pa.table(columns))
    monkeypatch.setattr("allstep.common.files.disk.available_memory", lambda: 2**25)
    with pytest.raises(UserError, match=rf"received {field} of .*: expected at most 33554432 .*, received 65536000"):
        open_data(kind, tmp_path / "set")


def test_texts_that_are_no_names(tmp_path):
    (tmp_path / "set").mkdir()
    names = ["\U0001f600" * 2**18, *"b" * 9999]
    pyarrow.parquet.write_table(pa.table({"x": np.arange(10000.0), "label": names}), tmp_path / "set" / "a.parquet")
    np.savez(tmp_path / "a.npz", x=np.arange(9.0), y=np.array([*"b" * 8, "a" * 201]))
    for kind, name, size in (("parquet", "set", 2**18), ("npz", "a.npz", 201)):
        with little_memory(), pytest.raises(UserError, match=f"classes of at most 200 .*, received {size}; name anoth"):
            open_data(kind, tmp_path / name)
