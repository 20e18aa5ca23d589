"""image-folder: real JPEG and PNG files in the layout of ImageNet."""

import functools
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile_files import endless, png_of, sparse
from PIL import Image

from allstep.common.base.errors import Fault, UserError
from allstep.common.base.random_state import uniform_draws
from allstep.common.data.datasets import DataConfig, load, prepare
from allstep.common.data.images import decoding
from allstep.common.data.images.crop import NUM_CROP_DRAWS, centre_box, random_resized_box
from allstep.common.data.images.encoded import PACKAGES

COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200)}


def save(path: Path, *, colour=(9, 9, 9), size=(40, 30), mode="RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write four training and two validation images per class: one colour per class, one size per image."""
    for name, colour in COLOURS.items():
        for number in range(4):
            suffix = (".jpg", ".JPEG", ".png", ".PNG")[number]
            save(tmp_path / "train" / name / f"{number}{suffix}", colour=colour, size=(40 + 9 * number, 37))
        for number in range(2):
            save(tmp_path / "val" / name / f"{number}.png", colour=colour, size=(30, 41))
    return tmp_path


def open_folder(folder: Path, **flags):
    return load(DataConfig(**{"dataset": "image-folder", "data_dir": folder, "image_size": 16, **flags}))


def unreadable(split) -> set[Path]:
    """Return the files that could not be read."""
    return {split.images.path(index) for index in np.flatnonzero(split.unreadable_mask())}


def gradient(path: Path, *, width=120, height=90) -> None:
    """Write an image whose pixels all have different colours, so that any change of crop or flip is seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * columns / width, 255 * rows / height, (columns + rows) % 256], axis=-1)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def gradients(tmp_path) -> Path:
    for split in ("train", "val"):
        for name in ("a", "b"):
            for number in range(5):
                gradient(tmp_path / split / name / f"{number}.png", width=100 + number)
    return tmp_path


def test_classes_are_numbered_by_name_and_images_have_their_colour(folder):
    dataset = open_folder(folder)
    assert dataset.num_classes == 3 and dataset.input_shape == (16, 16, 3)
    for split, count in ((dataset.train, 4), (dataset.validation, 2)):
        assert len(split) == 3 * count and split.parallel
        indices = np.random.default_rng(0).permutation(len(split))
        images, labels = split.read(indices, epoch=0)
        assert images.shape == (len(split), 16, 16, 3) and images.dtype == np.uint8
        assert labels.dtype == np.int64 and labels.tolist() == (indices // count).tolist()
        # JPEG changes colours slightly.
        colours = np.array(list(COLOURS.values()))[labels]
        assert np.abs(images.astype(int) - colours[:, None, None]).max() <= 4


def test_augmentation_depends_on_seed_epoch_and_index_alone(gradients):
    split = open_folder(gradients, decode_threads=3).train
    images, _ = split.read(np.arange(10), epoch=4)
    alone = open_folder(gradients, decode_threads=1).train
    for index in (9, 0, 4):
        np.testing.assert_array_equal(alone.read(np.array([index]), epoch=4)[0][0], images[index])
    repeated, _ = split.read(np.array([3, 3, 7]), epoch=4)
    np.testing.assert_array_equal(repeated, images[[3, 3, 7]])
    assert (split.read(np.arange(10), epoch=5)[0] != images).any(axis=(1, 2, 3)).all()
    other_seed = open_folder(gradients, seed=1).train
    assert (other_seed.read(np.arange(10), epoch=4)[0] != images).any(axis=(1, 2, 3)).all()


def test_crops_and_flips_are_those_of_seed_epoch_and_index(tmp_path):
    """Oracle: the same samples processed only by Pillow; within 1 of 255, and unlike the next index's."""
    rng = np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "val"), "ab", range(6)):
        path = tmp_path / split / name / f"{number}.{('jpg', 'png')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (70 + number, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert("CMYK" if number == 4 else "RGB").save(path)
    dataset = open_folder(tmp_path, seed=5, image_size=48)

    def by_pillow(images, index, box_of, flip) -> np.ndarray:
        with Image.open(images.path(index)) as image:
            box = box_of(*image.size)
            pixels = np.asarray(image.convert("RGB").resize((48, 48), Image.Resampling.BILINEAR, box=box))
        return (pixels[:, ::-1] if flip else pixels).astype(int)

    for epoch in (0, 3):
        trained, _ = dataset.train.read(np.arange(12), epoch=epoch)
        validated, _ = dataset.validation.read(np.arange(12), epoch=epoch)
        for index, draws in enumerate(uniform_draws(np.arange(12), NUM_CROP_DRAWS + 1, seed=5, epoch=epoch).tolist()):
            box_of = functools.partial(random_resized_box, draws=draws[:-1])
            expected = by_pillow(dataset.train.images, index, box_of, draws[-1] < 0.5)
            assert np.abs(trained[index] - expected).max() <= 1
            assert np.abs(trained[index - 1] - expected).max() > 1
            expected = by_pillow(dataset.validation.images, index, centre_box, False)
            assert np.abs(validated[index] - expected).max() <= 1


def test_half_of_the_training_images_are_mirrored(gradients):
    # Oracle: red grows to the right in the files. 200 fair coins give 70 to 130 heads but once in 50,000 times.
    split = open_folder(gradients).train
    images = np.concatenate([split.read(np.arange(10), epoch=epoch)[0] for epoch in range(20)]).astype(int)
    mirrored = images[:, :, 0, 0].mean(axis=1) > images[:, :, -1, 0].mean(axis=1)
    assert 70 <= mirrored.sum() <= 130


def test_validation_is_the_centre_crop_in_every_epoch(gradients):
    # Oracle: resize the shorter side to 256/224 of the size, then cut the centre, as is usually done.
    split = open_folder(gradients, image_size=56).validation
    images, _ = split.read(np.arange(10), epoch=0)
    np.testing.assert_array_equal(images, split.read(np.arange(10), epoch=1)[0])
    with Image.open(gradients / "val" / "a" / "0.png") as image:  # 100 x 90
        resized = np.asarray(image.resize((71, 64), Image.Resampling.BILINEAR)).astype(int)
    expected = resized[4:60, 7:63, :2]
    assert np.abs(images[0, :, :, :2] - expected).mean() < 2


def test_grey_palette_and_cmyk_images_become_rgb(folder):
    save(folder / "train" / "ant" / "9.jpg", mode="L", colour=(77, 77, 77))
    save(folder / "train" / "bee" / "9.png", mode="P", colour=(30, 200, 30))
    save(folder / "train" / "cat" / "9.jpg", mode="CMYK", colour=(30, 30, 200))
    images, _ = open_folder(folder).train.read(np.array([4, 9, 14]), epoch=0)
    for image, colour in zip(images, [(77, 77, 77), (30, 200, 30), (30, 30, 200)], strict=True):
        assert np.abs(image.astype(int) - colour).max() <= 12


@pytest.mark.filterwarnings("error")
def test_transparency_of_a_palette_is_left_out_without_a_warning(folder):
    image = Image.new("RGB", (9, 9), (30, 200, 30)).quantize(2)
    image.save(folder / "train" / "ant" / "9.png", transparency=b"\x10\x00")
    pixels, _ = open_folder(folder).train.read(np.array([4]), epoch=0)
    assert np.abs(pixels[0].astype(int) - (30, 200, 30)).max() <= 12


def test_other_files_are_passed_over_and_links_followed(folder, tmp_path_factory, capfd):
    ant = folder / "train" / "ant"
    for name in ("readme.txt", ".hidden.png", "Thumbs.db"):
        (ant / name).write_bytes(b"not an image")
    save(folder / "train" / ".cache" / "0.png")
    (folder / "train" / "classes.txt").write_text("ant bee cat")
    (ant / "folder.png").mkdir()
    (ant / "around").symlink_to(folder / "train")
    assert len(open_folder(folder).train) == 12
    expected = (
        f"{folder}: passed over hidden files: 2, such as .cache; files beside the class folders: 1, such as "
        "train/classes.txt; links to a folder around them: 1, such as around; files that are no images: 2, such as "
        "ant/Thumbs.db"
    )
    assert capfd.readouterr().err.splitlines()[-1] == f"allstep: warning: {expected}"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere / "dog" / "0.png", colour=(1, 2, 3))
    for split in ("train", "val"):
        (folder / split / "dog").symlink_to(elsewhere / "dog")
    os.symlink(elsewhere / "dog" / "0.png", ant / "link.png")
    dataset = open_folder(folder)
    assert dataset.num_classes == 4 and len(dataset.train) == 14
    assert (dataset.train.read(np.array([4]), epoch=0)[0] == (1, 2, 3)).all()


def png_of_16_bits() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(stream, "PNG")
    return stream.getvalue()


def pcx() -> bytes:
    stream = io.BytesIO()
    Image.new("P", (20, 20)).save(stream, "PCX")
    return stream.getvalue()


def truncated(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(stream, kind)
    return stream.getvalue()[: stream.tell() // 2]


UNREADABLE = {
    "empty": b"",
    "text": b"<html>404</html>",
    "truncated JPEG": truncated("JPEG"),
    "truncated PNG": truncated("PNG"),
    "16 bits": png_of_16_bits(),
    "PCX": pcx(),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_image_is_named_and_stops_the_run(folder, kind):
    path = folder / "train" / "bee" / "2.png"
    path.write_bytes(UNREADABLE[kind])
    split = open_folder(folder).train
    split.read(np.array([0, 5, 7, 11]), epoch=0)
    with pytest.raises(UserError) as caught:
        split.read(np.arange(12), epoch=0)
    assert str(path) in str(caught.value) and "--skip-unreadable" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_that_has_changed_since_it_was_read_is_named(folder):
    split, path = open_folder(folder).train, folder / "train" / "bee" / "2.png"
    indices = np.arange(len(split))
    split.read(indices, epoch=0)
    path.touch()
    split.read(indices, epoch=1)
    save(path, colour=(0, 0, 0))
    with pytest.raises(UserError, match=f"{path} has changed during training; start again"):
        split.read(indices, epoch=2)


def test_a_link_to_nowhere_is_an_unreadable_image(folder):
    (folder / "train" / "bee" / "4.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(UserError, match="expected an image in .*bee/4.png, received what cannot be read as one"):
        open_folder(folder).train.read(np.arange(13), epoch=0)


def test_skipped_images_are_replaced_by_the_next_of_their_class(gradients):
    # Oracle: the same folder with the replacement's content in the unreadable file.
    bad = [gradients / "train" / "a" / f"{number}.png" for number in (3, 4)]
    for path in bad:
        path.write_bytes((gradients / "train" / "a" / "0.png").read_bytes())
    expected, labels = open_folder(gradients).train.read(np.arange(10), epoch=2)
    for path in bad:
        path.write_bytes(b"bad")
    for threads in (1, 4):
        split = open_folder(gradients, skip_unreadable=True, decode_threads=threads).train
        assert unreadable(split) == set()
        images, found = split.read(np.arange(10), epoch=2)
        np.testing.assert_array_equal(images, expected)
        assert found.tolist() == labels.tolist() == [0] * 5 + [1] * 5
        split.read(np.arange(10), epoch=3)
        assert unreadable(split) == set(bad)


def test_a_class_without_a_readable_image_stops_even_so(folder):
    for path in (folder / "val" / "cat").iterdir():
        path.write_bytes(b"bad")
    split = open_folder(folder, skip_unreadable=True).validation
    with pytest.raises(UserError, match="can be read of the class of .*val/cat/.*, received none"):
        split.read(np.arange(6), epoch=0)


@pytest.mark.parametrize("step", [prepare, load])
def test_folders_that_are_not_right(folder, step):
    config = DataConfig(dataset="image-folder", data_dir=folder, image_size=16)
    (folder / "val" / "dog").mkdir()
    with pytest.raises(UserError, match="expected images in .*val/dog, received none"):
        step(config)
    save(folder / "val" / "dog" / "0.png")
    with pytest.raises(UserError, match="expected the same classes .*, received dog in .*val and not in .*train"):
        step(config)
    (folder / "train" / "Dog").mkdir()
    save(folder / "train" / "Dog" / "0.png")
    with pytest.raises(UserError, match="received 'Dog' in .*train and not in .*val, which has 'dog'; give them one"):
        step(config)
    (folder / "train").rename(folder / "trains")
    with pytest.raises(UserError, match="expected --data-dir to hold train/ and val/, .* received none at .*train"):
        step(config)
    (folder / "trains").rename(folder / "train")
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()
    with pytest.raises(UserError, match="expected a folder of images for each class in .*val, received none"):
        step(config)


@pytest.mark.parametrize("package", ["PIL", "simplejpeg", "cykooz_resizer"])
def test_a_package_that_is_missing_is_named(folder, monkeypatch, package):
    if package not in PACKAGES:
        pytest.skip("cykooz_resizer is used on x86-64 alone")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"expected {PACKAGES[package]} for --dataset image-folder, .* install it"):
        open_folder(folder)


HOSTILE = {
    "a FIFO": (os.mkfifo, "expected a regular file, received a FIFO"),
    "endless": (endless, "expected a regular file, received a character device"),
    "many pixels": (lambda path: path.write_bytes(png_of(10_000, 10_000)), "exceeds limit"),
    "more pixels": (lambda path: path.write_bytes(png_of(2**31 - 1, 2**31 - 1)), "exceeds limit"),
    "40 GB": (sparse, "it has 40000000000 bytes, more than"),
    "text": (lambda path: path.write_text("meow"), "neither JPEG nor PNG"),
    "cut": (lambda path: path.write_bytes(png_of(1000, 1000)), "truncated"),
    "16 bits": (lambda path: Image.fromarray(np.zeros((9, 9), np.uint16)).save(path), "more than 8 bits a channel"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_image_is_an_unreadable_one(folder, kind):
    make, reason = HOSTILE[kind]
    path = folder / "train" / "bee" / "2.png"
    path.unlink()
    make(path)
    with pytest.raises(UserError, match=f"expected an image in {path}, received what .*{reason}") as caught:
        open_folder(folder).train.read(np.arange(12), epoch=0)
    assert "\n" not in str(caught.value)
    split = open_folder(folder, skip_unreadable=True).train
    split.read(np.arange(12), epoch=0)
    assert unreadable(split) == {path}


def test_a_mistake_of_ours_is_no_unreadable_image(folder, monkeypatch):
    """A reader that treated every exception as damage would silently train on other images."""
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", None)
    with pytest.raises(TypeError):
        open_folder(folder, skip_unreadable=True).train.read(np.arange(12), epoch=0)


@pytest.mark.launch
def test_processes_decode_as_threads_do(gradients):
    threads, processes = (open_folder(gradients, decode_threads=n, skip_unreadable=True) for n in (4, 5))
    assert not threads.train.processes and processes.train.processes
    (gradients / "train" / "b" / "3.png").write_bytes(b"no image")
    order = np.random.default_rng(0).permutation(10)
    for part in ("train", "validation"):
        for epoch in (0, 1):
            expected, found = (getattr(one, part).read(order, epoch=epoch) for one in (threads, processes))
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
    assert unreadable(processes.train) == {gradients / "train" / "b" / "3.png"}
    assert not unreadable(processes.validation)


@pytest.mark.launch
def test_processes_pass_on_errors(gradients):
    split = open_folder(gradients, decode_threads=5).train
    (gradients / "train" / "b" / "3.png").write_bytes(b"no image")
    for _ in range(6):  # each leaves its place in the shared memory to the next
        with pytest.raises(UserError, match="expected an image in .*3.png"):
            split.read(np.array([8]), epoch=0)
    assert len(split.read(np.arange(8), epoch=0)[0]) == 8


@pytest.mark.launch
def test_a_killed_process_is_a_fault(gradients):
    split = open_folder(gradients, decode_threads=5).train
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):  # also where it is known before
        with pytest.raises(Fault, match="a process that reads images has ended: .*; lower --decode-threads"):
            split.read(np.arange(10), epoch=0)
