"""Data sets of PyTorch as other people write them. Oracles: PyTorch's DataLoader in one process, or the exact line."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

from allstep.common.base.errors import Fault, UserError
from allstep.common.data.datasets import DataConfig, Dataset
from allstep.common.data.formats.python_file import as_dataset
from allstep.common.data.worker_processes import WorkerProcesses
from allstep.common.launch.spawn import NOTICES

SIZE = 24
X, Y = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0)), torch.arange(SIZE) % 3
Backwards = collections.namedtuple("Backwards", "label image")


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


class Samples(torch.utils.data.Dataset):
    """Samples that a function makes of their number."""

    def __init__(self, sample: Callable[[int], Any], **attributes: Any) -> None:
        self.sample = sample
        vars(self).update(attributes)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Fetched(Samples):
    """Samples that PyTorch fetches together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(2 * X[index], int(Y[index])) for index in indices]


class Columns(Samples):
    """Samples that are fetched together as columns."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": X[indices], "y": Y[indices]}


class HuggingFace(Samples):
    """Samples as rows of a table that knows its classes and reads a column by itself, as in `datasets`."""

    def with_format(self, _: str, columns: list[str]) -> HuggingFace:
        return HuggingFace(lambda rows: {name: Y.numpy()[rows] for name in columns}, features=self.features)


def opened(samples: Any, data_workers: int = 0) -> Dataset:
    return as_dataset(samples, samples, DataConfig(data_workers=data_workers), where="the samples")


def read(dataset: Dataset, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return dataset.train.read(np.arange(len(dataset.train)), epoch=epoch)


TENSORS = TensorDataset(X, Y)
KINDS = {
    "tuples": Samples(lambda index: (X[index], int(Y[index]))),
    "named tuples": Samples(lambda index: Backwards(int(Y[index]), X[index])),
    "data classes": Samples(lambda index: Sample(X[index].numpy(), Y[index])),
    "NumPy's numbers": Samples(lambda index: [X[index].tolist(), np.int16(Y[index])]),
    "labels as fractions": Samples(lambda index: (X[index], float(Y[index]))),
    "labels in a tensor": Samples(lambda index: (X[index], Y[index : index + 1])),
    "labels as bytes": Samples(lambda index: (X[index], b"abc"[Y[index] :][:1])),
    "a list of pairs": [(X[index], int(Y[index])) for index in range(SIZE)],
    "a part of a part": Subset(Subset(TENSORS, range(2, 20)), [0, 5, 3, -1]),
    "parts together": ConcatDataset([TENSORS, Subset(TENSORS, [1, 2])]),
    "tensors by name": StackDataset(x=X, y=Y),
    "samples that are fetched together": Fetched(lambda index: (X[index], int(Y[index]))),
    "wrong targets": Samples(lambda index: (X[index], int(Y[index])), targets=[1] * SIZE),
}


@pytest.mark.parametrize("data_workers", [0, pytest.param(3, marks=pytest.mark.launch)])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_loader_of_pytorch(kind, data_workers):
    samples = KINDS[kind]
    inputs, labels = [], []
    for one in DataLoader(samples, batch_size=1, collate_fn=lambda batch: batch[0]):
        sample = one if isinstance(one, (dict, Sample, Backwards)) else Sample(*one)
        fields = sample if isinstance(sample, dict) else sample._asdict() if isinstance(sample, tuple) else vars(sample)
        inputs.append(np.asarray(fields.get("x", fields.get("image")), np.float32))
        label = fields.get("y", fields.get("label"))
        labels.append("abc".index(label.decode()) if isinstance(label, bytes) else int(label))
    dataset = opened(samples, data_workers)
    assert (dataset.task, dataset.num_classes) == ("classification", 3)
    found = read(dataset)
    np.testing.assert_array_equal(found[0], np.array(inputs))
    np.testing.assert_array_equal(found[1], labels)


@pytest.mark.parametrize("part", [lambda table: table, lambda table: Subset(table, [3, 1])])
def test_tables_of_hugging_face_know_their_classes(part, capfd):
    """Names tell the number of classes, also of those that no sample has; samples are not read for their labels."""
    names = types.SimpleNamespace(names=["a", "b", "c", "d"])
    table = HuggingFace(lambda i: {"image": X[i], "label": int(Y[i])}, features={"image": None, "label": names})
    dataset = opened(part(table))
    assert (dataset.num_classes, dataset.class_names) == (4, ("a", "b", "c", "d"))
    np.testing.assert_array_equal(read(dataset)[1], part(TENSORS)[:][1])
    assert "are read once" not in capfd.readouterr().err


RARE = ["cat"] * SIZE
RARE[3], RARE[17] = "ant", "dog"
NAMED = {
    "names": Samples(lambda index: (X[index], RARE[index])),
    "bytes": Samples(lambda index: {"x": X[index], "y": RARE[index].encode()}),
    "named classes": Samples(lambda index: (X[index], RARE[index]), classes=["dog", "cat", "ant"]),
    "classes of other names": Samples(lambda index: (X[index], RARE[index]), classes=["Dog", "Cat", "Ant"]),
    "names at hand": Samples(lambda index: (X[index], RARE[index]), targets=RARE),
    "a table": HuggingFace(lambda index: {"x": X[index], "y": RARE[index]}, features={"y": None}),
}


@pytest.mark.parametrize("kind", NAMED)
def test_names_that_few_samples_have(kind):
    samples = NAMED[kind]
    dataset = as_dataset(samples, samples, DataConfig(), where="the samples")
    expected = ("dog", "cat", "ant") if kind == "named classes" else ("ant", "cat", "dog")
    assert (dataset.num_classes, dataset.class_names) == (3, expected)
    assert [expected[label] for label in read(dataset)[1]] == RARE


@pytest.mark.parametrize(
    "attributes",
    [
        *({"classes": np.array(["a", "b", "c"])}, {"classes": 3}, {"classes": lambda: 3}, {"num_classes": "3"}),
        *({"num_classes": torch.tensor(3)}, {"num_classes": lambda: 3}, {"targets": [[1], [2, 3]] * 12}),
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_what_a_data_set_says_of_its_classes_has_many_forms(attributes):
    dataset = opened(Samples(lambda index: (X[index], int(Y[index])), **attributes))
    assert dataset.num_classes == 3 and type(dataset.num_classes) is int
    np.testing.assert_array_equal(read(dataset)[1], Y)


def test_several_fields_are_numbers_whatever_their_types():
    samples = Samples(lambda index: {"age": index, "ok": bool(Y[index]), "more": X[index], "y": int(Y[index])})
    dataset = as_dataset(samples, samples, DataConfig(input_fields=("age", "ok", "more")), where="the samples")
    expected = np.column_stack([np.arange(SIZE), Y > 0, X]).astype(np.float32)
    np.testing.assert_array_equal(read(dataset)[0], expected, strict=True)


def test_parts_with_other_classes_are_refused():
    train, validation = (
        Samples(lambda index: (X[index], index % 2), classes=names) for names in (["a", "b", "c"], ["a", "c"])
    )
    with pytest.raises(UserError, match="the same class names in both parts of .*, received a, b, c to train and a, c"):
        as_dataset(train, validation, DataConfig(), where="the samples")


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_numbers_are_targets_of_any_shape(shape):
    dataset = opened(Samples(lambda index: (X[index], X[index].sum().expand(shape) + 0.5)))
    expected = np.array([target.numpy() for _, target in (dataset.train.samples.samples[i] for i in range(SIZE))])
    assert dataset.task == "regression"
    np.testing.assert_array_equal(read(dataset)[1], expected.reshape(SIZE, -1))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_random_samples_depend_on_seed_epoch_and_number_alone(draw):
    """They are the same on any number of ranks, and what the process draws elsewhere stays as it was."""
    dataset = opened(Samples(lambda index: (X[index] + draw(), int(Y[index]))))
    assert not dataset.train.parallel
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    whole, _ = read(dataset)
    again = np.concatenate([dataset.train.read(np.array([index]), epoch=0)[0] for index in reversed(range(SIZE))])
    np.testing.assert_array_equal(again[::-1], whole)
    assert not np.array_equal(read(dataset, epoch=1)[0], whole)
    assert len(np.unique((whole - X.numpy())[:, 0].round(5))) > SIZE // 2
    assert random.getstate() == states[0] and np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.launch
@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_random_samples_are_the_same_by_processes(draw):
    samples = Samples(lambda index: (X[index] + draw(), int(Y[index])))
    by_others = opened(samples, data_workers=2)
    assert by_others.train.parallel
    for epoch in range(2):
        np.testing.assert_array_equal(read(by_others, epoch)[0], read(opened(samples), epoch)[0])


def test_samples_are_read_one_after_the_other():
    """A data set may keep an open file in which it seeks."""
    inside = threading.Semaphore(1)

    def sample(index: int) -> tuple[torch.Tensor, int]:
        assert inside.acquire(blocking=False)
        threading.Event().wait(0.001)
        inside.release()
        return X[index], int(Y[index])

    dataset, failed = opened(Samples(sample)), list[Exception]()

    def read_all() -> None:
        try:
            read(dataset)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=read_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dataset.train.parallel and not failed


class InAFile(torch.utils.data.Dataset):
    """Samples of 8 bytes in a file that is opened with the first one, as people open HDF5 for DataLoader's workers."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.file = self.file or self.path.open("rb", buffering=0)
        self.file.seek(8 * index)
        return np.frombuffer(self.file.read(4) + self.file.read(4), np.float32), index % 3


@pytest.mark.launch
def test_each_process_opens_files_of_its_own(tmp_path):
    values = np.arange(1000, dtype=np.float32)
    (tmp_path / "values").write_bytes(values.tobytes())
    inputs, _ = read(opened(InAFile(tmp_path / "values"), data_workers=4))
    np.testing.assert_array_equal(inputs, values.reshape(500, 2))


@pytest.mark.launch
@pytest.mark.parametrize(("last_words", "expected"), [("os._exit(1)", Fault), ("1 / 0", UserError)])
def test_a_process_that_reads_fails(last_words, expected):
    own = os.getpid()

    def sample(index: int) -> tuple[torch.Tensor, int]:
        assert os.getpid() != own
        return X[index], int(Y[index]) if index != 13 else eval(last_words)

    dataset = opened(Samples(sample, targets=Y.tolist()), data_workers=2)
    with pytest.raises(expected, match="lower --data-workers" if expected is Fault else "division by zero"):
        read(dataset)


@pytest.mark.launch
def test_notices_of_schedulers_leave_the_processes_that_read():
    """Schedulers signal all processes of a job, while the rank goes on to the next checkpoint."""
    samples = WorkerProcesses(os, 1, "the samples", "--data-workers")
    reader = samples.call(os.getpid)
    for number in NOTICES:
        os.kill(reader, number)
        assert samples.call(os.getpid) == reader


@pytest.mark.launch
def test_processes_that_read_end_with_a_killed_rank(tmp_path):
    program = """
import os, time
from allstep.common.data.worker_processes import WorkerProcesses
print(WorkerProcesses(os, 1, "the samples", "--data-workers").call(os.getpid), flush=True)
os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    reader = int(result.stdout)
    for _ in range(300):
        with contextlib.suppress(ProcessLookupError):
            os.kill(reader, 0)
            time.sleep(0.1)
            continue
        return
    raise AssertionError(f"process {reader} goes on")


def test_only_map_style_data_is_read_by_processes():
    with pytest.raises(UserError, match="needs a map-style data set, and the samples is none; leave it out"):
        opened((X.numpy(), Y.numpy()), data_workers=2)


def test_what_is_told(capfd):
    own = np.random.default_rng(0)
    opened(Samples(lambda index: (X[index] + own.random(), int(Y[index]))))
    assert "the samples draws random numbers from a generator of its own, which no seed sets" in capfd.readouterr().err
    opened(Samples(lambda index: (int(Y[index]), X[index])))
    assert "each input of the samples is one number and each target 6: return the input" in capfd.readouterr().err


REFUSED = {
    "sparse": ((X.to_sparse(), Y), "expected plain tensors as samples, received a sparse one; convert it by .to_dense"),
    "quantized": ((torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), Y), "received a quantized one; convert it by"),
    "without numbers": ((X.to("meta"), Y), "expected plain tensors as samples, received one that is no array: NotImpl"),
    "too few classes": (
        Samples(lambda index: (X[index], int(Y[index])), classes=["a", "b"]),
        "expected labels from 0 to 1 in the samples, received 2 in sample 2; correct it, or their number",
    ),
    "a token that is ignored": (
        Samples(lambda index: (np.arange(4), np.array([1, 2, 3, -100 if index == 5 else 4])), num_classes=5),
        "expected labels from 0 to 4 in the samples, received -100 in sample 5; correct it, or their number",
    ),
    "a token too large": (
        Samples(lambda index: (np.arange(4) + 2 * (index == 7), int(Y[index])), classes=[*"abc"], num_tokens=5),
        "expected tokens from 0 to 4 in the samples, received 5 in sample 7; correct it, or their number",
    ),
    "three values": (Samples(lambda index: (X[index], 0, index)), "received 3 values; return these two"),
    "fewer than promised": (
        Samples(lambda index: (X[:-1][index], float(X[index, 0]))),
        "to return for the samples, received IndexError",
    ),
    "columns": (Columns(None), "expected __getitems__ of the samples to return a list of samples, received dict"),
    "several inputs": (Samples(lambda index: ((X[index], X[index]), 0)), "expected one input of numbers .* tuple"),
    "a field that is not there": (
        Samples(lambda index: {"x": X[index], **({"y": 0} if index != 9 else {})}),
        "expected the fields of sample 9 for the samples, received KeyError: 'y'",
    ),
    "a number among names": (Samples(lambda index: (X[index], "a" if index < 9 else 0)), "as in the first, received 0"),
    "a label that targets lack": (
        Samples(lambda index: (X[index], 7 if index == 5 else int(Y[index])), targets=Y.tolist()),
        "expected labels from 0 to 2 in the samples, received 7 in sample 5",
    ),
    "a mapping inside": (Samples(lambda index: ({"a": X[index]}, 0)), "expected one input of numbers .* received dict"),
    "a name among numbers": (Samples(lambda index: (X[index], 0 if index < 9 else "b")), "as in the first, received b"),
    "boxes": (
        Samples(lambda index: (X[index], {"boxes": X[: index % 3], "labels": Y[: index % 3]})),
        "expected the targets of the samples to be numbers or names, of one shape for all samples",
    ),
    "nothing": (Samples(lambda index: None), "received NoneType; return these two"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    samples, line = REFUSED[kind]
    with pytest.raises(UserError, match=line):
        read(opened(samples))
