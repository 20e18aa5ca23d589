"""Data that programs pass to a Session. Oracle: what torch's DataLoader makes of it, and a plain loop of torch."""

from __future__ import annotations

import copy
import functools

import keras
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.formats.python_file import as_dataset
from allstep.pytorch import Session

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (40, 9, 8, 3)).astype(np.uint8)
LABELS = torch.arange(40) % 4
IMAGES = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
TENSORS = TensorDataset(IMAGES, LABELS)
WEIGHTED = DataLoader(TENSORS, sampler=WeightedRandomSampler([0.5] * 40, 40), collate_fn=list)


class Samples(Dataset):
    """Map-style data set whose samples a function makes."""

    def __init__(self, sample, **attributes):
        self.sample, self.num_read = sample, 0
        vars(self).update(attributes)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.num_read += 1
        return self.sample(index)


class Stream(IterableDataset):
    def __iter__(self):
        yield from TENSORS


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return PIXELS[index : index + 10], LABELS[index : index + 10].numpy()


class Read:
    """Object with a method that reads, and forgets an argument."""

    def __len__(self):
        return 4

    def read(self, indices):
        return indices, indices


def opened(samples, validation=None, **flags):
    return as_dataset(samples, validation, DataConfig(**flags), where="the samples")


KINDS = {
    "tensors": (IMAGES, LABELS),
    "TensorDataset": TENSORS,
    "Subset": Subset(TENSORS, range(40)),
    "Subset of Subset": Subset(Subset(TENSORS, list(range(39, -1, -1))), list(range(39, -1, -1))),
    "ConcatDataset": ConcatDataset([Subset(TENSORS, range(15)), Subset(TENSORS, range(15, 40))]),
    "map-style": Samples(lambda index: (IMAGES[index], int(LABELS[index]))),
    "arrays of a data set": Samples(lambda index: (IMAGES[index].numpy(), LABELS[index].item())),
    "lists": Samples(lambda index: [IMAGES[index], LABELS[index]]),
    "gradients": Samples(lambda index: (IMAGES[index].clone().requires_grad_(), LABELS[index])),
    "a mapping": Samples(lambda index: {"image": IMAGES[index], "label": LABELS[index], "name": "a"}),
    "half": Samples(lambda index: (IMAGES[index].to(torch.bfloat16).float(), LABELS[index])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_a_data_loader(kind):
    dataset = opened(KINDS[kind], KINDS[kind])
    assert (dataset.task, dataset.num_classes, dataset.input_shape) == ("classification", 4, (9, 8, 3))
    indices = np.array([3, 39, 0])
    inputs, labels = dataset.train.read(indices, epoch=0)
    expected = IMAGES[indices]
    if isinstance(KINDS[kind], Dataset) and kind != "a mapping":
        expected, classes = default_collate([tuple(KINDS[kind][index]) for index in indices])
        assert classes.tolist() == labels.tolist()
    np.testing.assert_array_equal(np.moveaxis(inputs, -1, 1), expected.detach().numpy())
    assert labels.tolist() == LABELS[indices].tolist()


def test_pillow_images_are_pixels():
    dataset = opened(Samples(lambda index: (Image.fromarray(PIXELS[index]), int(LABELS[index]))))
    inputs, labels = dataset.validation.read(np.arange(4), epoch=0)
    assert inputs.dtype == np.uint8 and all(any((one == pixels).all() for pixels in PIXELS) for one in inputs)
    grey = opened(Samples(lambda index: (Image.fromarray(PIXELS[index, ..., 0]), int(LABELS[index]))))
    assert grey.input_shape == (9, 8, 1)
    with pytest.raises(UserError, match=r'modes L, RGB, RGBA in the samples, received P; .*convert\("RGB"\)'):
        opened(Samples(lambda index: (Image.fromarray(PIXELS[index]).convert("P"), 0)))


def test_labels_are_found_without_reading_where_the_data_set_has_them(capfd):
    def num_read(**attributes):
        samples = Samples(lambda index: (IMAGES[index], int(LABELS[index])), **attributes)
        return opened(samples, samples), samples.num_read

    dataset, few = num_read(targets=LABELS.tolist())
    assert dataset.num_classes == 4 and few < 15
    dataset, few = num_read(classes=["a", "b", "c", "d", "e"])
    assert (dataset.num_classes, dataset.class_names) == (5, ("a", "b", "c", "d", "e")) and few < 15
    assert "read once" not in capfd.readouterr().err
    # Labels that are not those of the samples, as with a target_transform.
    dataset, many = num_read(targets=(LABELS + 1).tolist())
    assert dataset.num_classes == 4 and many >= 80
    assert capfd.readouterr().err.count("all 40 samples of the samples are read once for their labels") == 2


def test_parts_keep_the_classes_of_the_whole():
    whole = Samples(lambda index: (IMAGES[index], int(LABELS[index])), targets=LABELS, classes=list("abcd"))
    dataset = opened(Subset(whole, [0, 1, 4, 5]), Subset(whole, [8, 9]))
    assert dataset.num_classes == 4 and dataset.train.targets.tolist() == [0, 1, 0, 1]


def test_fields_of_a_mapping_are_named_or_chosen_by_flags(capfd):
    samples = Samples(lambda index: {"pixel_values": IMAGES[index], "age": torch.tensor(3.0), "labels": LABELS[index]})
    assert opened(samples, samples).task == "classification"
    line = "passed over fields besides pixel_values and labels: 1, such as age"
    assert line in capfd.readouterr().err
    assert opened(samples, samples, target_field="age").task == "regression"
    with pytest.raises(UserError, match="a field x in the samples, received age, labels, pixel_values"):
        opened(samples, input_fields=("x",))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (Samples(lambda index: (IMAGES[index], 0, "name")), "an input and a target, .* received 3 values"),
        (Samples(lambda index: IMAGES[index]), "an input and a target, .* received Tensor"),
        (TensorDataset(IMAGES, LABELS, LABELS), "received 3 values; return these two"),
        (Samples(lambda index: (IMAGES[index, :, index % 3 :], 0)), "of one shape for all samples"),
        (
            Samples(lambda index: [][index]),
            r"__getitem__\(\) to return .* IndexError.* in line \d+ of .*test_session_data",
        ),
        ([object()] * 3, "a map-style data set, .* received a list of 3 objects .object, ....; "),
        (Stream(), "a map-style data set, .* received Stream, whose samples cannot be read by their number"),
        (DataLoader(TENSORS, shuffle=True), "received DataLoader, .*; give its dataset$"),
        (WEIGHTED, "; give its dataset; WeightedRandomSampler, list would have no effect .see --sampler, .*"),
        (Batches(), "received Batches"),
        (Samples(lambda index: (IMAGES[index], (int(LABELS[index]), 0.5))), r"one target .*, received \(0, 0.5\)"),
        (Read(), r"expected read\(\) to return .* received TypeError: .*unexpected keyword argument 'epoch'"),
        (Subset(TENSORS, []), "at least 1 sample"),
        ((IMAGES.numpy(), LABELS), r"have the shape \(3, 9, 8\), which looks like channels first; .*to \(9, 8, 3\)"),
        ((torch.from_numpy(PIXELS), LABELS), r"have the shape \(9, 8, 3\), which looks like channels last"),
        (TensorDataset(torch.from_numpy(PIXELS), LABELS), "looks like channels last; .* permute them"),
        (Samples(lambda index: (PIXELS[index], 0)), "looks like channels last"),
        ((np.zeros((4, 1, 28, 28), np.uint8), [0, 1, 0, 1]), "looks like channels first"),
    ],
)
def test_data_that_cannot_be_read_is_refused_in_a_line(samples, expected):
    with pytest.raises(UserError, match=expected) as error:
        dataset = opened(samples, samples)
        dataset.train.read(np.arange(4), epoch=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "parts",
    [
        random_split(TENSORS, [32, 8]),
        (IMAGES[:32], LABELS[:32], IMAGES[32:], LABELS[32:]),
        [(PIXELS[:32], LABELS[:32]), (PIXELS[32:], LABELS[32:])],
    ],
    ids=["random_split", "four", "pairs"],
)
def test_two_parts_in_one_object(parts):
    dataset = opened(parts)
    assert (len(dataset.train), len(dataset.validation), dataset.input_shape) == (32, 8, (9, 8, 3))


def test_two_data_loaders_are_no_inputs_and_targets():
    with pytest.raises(UserError, match="received DataLoader, .*; give its dataset; WeightedRandomSampler, list"):
        opened((WEIGHTED, DataLoader(TENSORS)))


def test_lists_are_inputs_and_targets_or_samples():
    dataset = opened(([[1.0, 2.0]] * 4, [0, 1, 1, 0]))
    assert (dataset.input_shape, len(dataset.train) + len(dataset.validation)) == ((2,), 4)
    dataset = opened([(PIXELS[index], int(LABELS[index])) for index in range(4)])
    assert (dataset.input_shape, len(dataset.train) + len(dataset.validation)) == ((9, 8, 3), 4)


def test_parts_of_different_layouts_are_compared():
    with pytest.raises(UserError, match="inputs of one shape and type in both parts"):
        opened((torch.zeros(4, 5, 9, 8), [0, 1, 0, 1]), (np.zeros((4, 5, 9, 8), np.float32), [0, 1, 0, 1]))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(84, 4))


@pytest.mark.parametrize("kind", ["random_split", "map-style"])
def test_a_session_trains_like_a_plain_loop(kind):
    """Batches of all samples, since the orders differ."""
    train, validation = KINDS["map-style"], TENSORS
    if kind == "random_split":
        train, validation = random_split(TENSORS, [32, 8], torch.Generator().manual_seed(1))
    model, by_hand = network(), copy.deepcopy(network())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05, momentum=0.9)
    [(images, labels)] = DataLoader(train, batch_size=len(train))
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(images), labels).backward()
        optimizer.step()
    loss = nn.CrossEntropyLoss() if kind == "map-style" else functools.partial(nn.functional.cross_entropy)
    flags = {
        "loss": loss,
        "global_batch_size": len(train),
        "base_lr": 0.05,
        "epochs": 3,
        "warmup_epochs": 0,
        "lr_decay": "constant",
    }
    history = Session(model, train, validation, optimizer="sgd", **flags).fit()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    [(images, labels)] = DataLoader(validation, batch_size=len(validation))
    loss = nn.functional.cross_entropy(by_hand(images), labels)
    assert history[-1]["validation_loss"] == pytest.approx(loss.item(), 1e-5)
