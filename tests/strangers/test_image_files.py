"""Folders of images as other people have them: all are read as torchvision reads them, or a line says what is not.

Oracles: torchvision's ImageFolder, Pillow, or the exact line.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from other_data import opened, picture
from PIL import Image, ImageOps

from allstep.common.base.errors import UserError
from allstep.common.data.images.crop import centre_box
from allstep.common.data.images.decoding import Decoder, UnreadableImage
from allstep.common.training.same_on_ranks import digests_of

FILES = {  # in class folders, as torchvision's ImageFolder reads them
    "a.jpg": "JPEG", "b.JPEG": "JPEG", "c.PNG": "PNG", "d.webp": "WEBP", "e.bmp": "BMP", "f.tif": "TIFF",
    "g.TIFF": "TIFF", "h.ppm": "PPM", "i.pgm": "PPM", "with space.jpg": "JPEG", "ünï.png": "PNG", "deep/a.png": "PNG",
    "deep/er/b.webp": "WEBP", "deep-er/c.bmp": "BMP",
}  # fmt: skip
OTHERS = {"j.gif": "GIF", "k.jfif": "JPEG", "l.JP2": "JPEG2000"}
"""Images that Hugging Face's `datasets` reads besides."""


def save(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(grey=path.suffix == ".pgm").save(path, kind)


def validated(path: Path, *, turned: bool = False) -> np.ndarray:
    """Return what Pillow makes of a validation image."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image) if turned else image
        box = centre_box(*image.size)
        return np.asarray(image.convert("RGB").resize((8, 8), Image.Resampling.BILINEAR, box=box)).astype(int)


@pytest.fixture
def folder(tmp_path) -> Path:
    for part in ("train", "valid"):
        for name in ("cat", "dog 2"):
            for file, kind in FILES.items():
                save(tmp_path / part / name / file, kind)
    return tmp_path


def test_class_folders_are_those_of_torchvision(folder, capfd):
    from torchvision.datasets import ImageFolder

    dataset = opened("image-folder", folder, data_dir=folder)
    assert capfd.readouterr().err == ""
    for split, part in ((dataset.train, "train"), (dataset.validation, "valid")):
        expected = ImageFolder(str(folder / part))
        assert [str(split.images.path(index)) for index in range(len(split))] == [path for path, _ in expected.samples]
        assert split.targets.tolist() == expected.targets and list(split.images.classes) == expected.classes
        assert len(split) == 2 * len(FILES)
    images, _ = dataset.validation.read(np.arange(len(dataset.validation)), epoch=0)
    for index, image in enumerate(images):
        assert np.abs(image - validated(dataset.validation.images.path(index))).max() <= 1


def test_other_images_of_pillow_are_read_and_the_rest_is_counted(folder, capfd):
    for file, kind in OTHERS.items():
        save(folder / "valid" / "cat" / file, kind)
    cat = folder / "train" / "cat"
    for name in ("x.psd", "y.svg", "z.mp4", ".DS_Store", "._a.jpg"):
        (cat / name).write_bytes(b"?")
    (cat / ".ipynb_checkpoints").mkdir()
    (cat / "again").symlink_to(cat)
    (folder / "train" / "loose.jpg").write_bytes(b"?")
    for name in ("test", "elsewhere"):
        (folder / name).mkdir()
    dataset = opened("image-folder", folder, data_dir=folder)
    assert len(dataset.train) == 2 * len(FILES) and len(dataset.validation) == 2 * len(FILES) + len(OTHERS)
    images, _ = dataset.validation.read(np.arange(len(dataset.validation)), epoch=0)
    for index, image in enumerate(images):
        assert np.abs(image - validated(dataset.validation.images.path(index))).max() <= 1
    assert capfd.readouterr().err == (
        f"allstep: warning: {folder}: passed over folders of other parts than train and valid: 1, such as test; "
        "folders beside train/: 1, such as elsewhere; files beside the class folders: 1, such as train/loose.jpg; "
        "hidden files: 3, such as .DS_Store; links to a folder around them: 1, such as again; files that are no "
        "images: 3, such as cat/x.psd\n"
    )


@pytest.mark.parametrize("layout", ["train", "."])
def test_a_share_of_class_folders_is_held_out(layout, tmp_path):
    for name in "ab":
        for number in range(20):
            save(tmp_path / layout / name / f"{number:02}.png", "PNG")
    dataset = opened("image-folder", tmp_path, data_dir=tmp_path, validation_share=0.25)
    assert (len(dataset.train), len(dataset.validation)) == (30, 10)
    images, labels = dataset.validation.read(np.arange(10), epoch=0)
    held = [dataset.validation.whole.images.path(index) for index in dataset.validation.indices]
    assert [path.parent.name for path in held] == ["ab"[label] for label in labels]
    for image, path in zip(images, held, strict=True):  # not augmented
        assert np.abs(image - validated(path)).max() <= 1


@pytest.mark.parametrize("part", ["val", "validation", "VALID", "test", "Testing", "eval", "dev"])
def test_names_of_validation_folders(part, tmp_path):
    for name, number in (("Train", 3), (part, 2)):
        for index in range(number):
            save(tmp_path / name / "a" / f"{index}.png", "PNG")
    dataset = opened("image-folder", tmp_path, data_dir=tmp_path)
    assert (len(dataset.train), len(dataset.validation)) == (3, 2)


@pytest.mark.parametrize(
    ("train", "other"),
    [("training_set", "test_set"), ("train2017", "val2017"), ("seg_train/seg_train", "seg_test/seg_test"),
     ("data/train", "data/val")],
)  # fmt: skip
def test_parts_are_no_classes(train, other, tmp_path):
    for part in (train, other):
        for name in ("cats", "dogs"):
            save(tmp_path / part / name / "0.png", "PNG")
    with pytest.raises(UserError, match=f"expected train/ and val/, or a folder .*, received .*{train[:4]}.*; name "):
        opened("image-folder", tmp_path, data_dir=tmp_path)


def test_names_of_any_bytes(tmp_path):
    for name in (b"caf\xe9", b"tea"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        for number in range(3):
            with open(os.path.join(folder, b"\xff%d.png" % number), "wb") as stream:
                picture().save(stream, "PNG")
    dataset = opened("image-folder", tmp_path, data_dir=tmp_path)
    assert dataset.class_names == ("caf\udce9", "tea") and len(dataset.train) + len(dataset.validation) == 6
    images, _ = dataset.validation.read(np.arange(1), epoch=0)
    held = dataset.validation.whole.images.path(dataset.validation.indices[0])
    assert np.abs(images[0] - validated(held)).max() <= 1
    assert "class names" in digests_of(dataset)


def test_classes_may_be_named_like_parts(tmp_path):
    for name in ("train_station", "test_tube/in a folder", "evaluation form"):
        for number in range(3):
            save(tmp_path / name / f"{number}.png", "PNG")
    assert opened("image-folder", tmp_path, data_dir=tmp_path).num_classes == 3


def test_a_part_in_two_spellings_is_told(tmp_path, capfd):
    for name in ("Train", "train", "val", "VAL"):
        save(tmp_path / name / "a" / "0.png", "PNG")
    opened("image-folder", tmp_path, data_dir=tmp_path)
    assert "folders beside train/: 2, such as train" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_obeyed_if_asked(kind, orientation, tmp_path):
    """Oracle: Pillow's exif_transpose."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream, path = io.BytesIO(), tmp_path / "image"
    picture().save(stream, kind, exif=exif)
    path.write_bytes(stream.getvalue())
    with Image.open(path) as image:
        expected = {
            True: np.asarray(ImageOps.exif_transpose(image).convert("RGB")),
            False: np.asarray(image.convert("RGB")),
        }
    for turns in (True, False):
        pixels, box = Decoder(turns=turns).decode(stream.getvalue(), lambda width, height: (0, 0, width, height), 224)
        np.testing.assert_array_equal(pixels, expected[turns])
        assert box[2:] == pixels.shape[1::-1]


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I;16", "TIFF"), ("F", "TIFF"), ("I", "TIFF")])
def test_more_than_8_bits_are_refused(mode, kind):
    stream = io.BytesIO()
    Image.new(mode, (9, 9)).save(stream, kind)
    with pytest.raises(UnreadableImage, match="more than 8 bits a channel; convert it to 8"):
        Decoder().decode(stream.getvalue(), centre_box, 8)


def test_rank_0_alone_says_what_is_passed_over(folder, monkeypatch, capfd):
    (folder / "train" / "cat" / "notes.txt").write_text("?")
    monkeypatch.setenv("RANK", "1")
    opened("image-folder", folder, data_dir=folder)
    assert capfd.readouterr().err == ""
