"""A folder of files as an image set: sizes, splits, and what is kept decoded or streamed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elle.config import KEYS
from elle.data.folder import FolderSplit
from elle.data.image_folder import FolderImages, enough_images, filled_in, training_source
from elle.data.registry import dataset_statistics, load_dataset
from elle.data.resident import Resident
from elle.data.sources import ImageSet
from elle.data.streaming import Streaming
from elle.errors import InputError, WorkError

from .photographs import photograph, write_folder, write_photographs

OPTIONS = {"validation": 4, "seed": 0, "batch": 8, "epochs": 2, "crop": 4, "flip": True, "workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("set"))


def one_size(root, width, height, count=2):
    for split in ("train", "val"):
        for number in range(count):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            photograph(np.random.default_rng(number), width, height).save(folder / "photo.png")
    return root


def test_images_are_decoded_to_one_size_with_their_labels_and_classes(root):
    images = load_dataset("folder", root, image_size=32, workers=0)
    assert images.classes == ("cat", "dog")
    assert (images.train.x.shape, images.train.x.dtype) == ((24, 3, 32, 32), np.uint8)
    assert (images.test.x.shape, images.test.y.tolist()) == ((8, 3, 32, 32), [0] * 4 + [1] * 4)


def test_workers_decode_what_one_process_does(root, monkeypatch):
    monkeypatch.setattr("elle.data.image_folder._CHUNK", 5)
    alone, shared = (load_dataset("folder", root, image_size=32, workers=count).train.x for count in (0, 2))
    np.testing.assert_array_equal(alone, shared)


def test_an_image_of_that_very_size_is_not_touched(tmp_path):
    images = load_dataset("folder", one_size(tmp_path, 64, 64))
    pixels = np.asarray(Image.open(tmp_path / "train" / "class1" / "photo.png"))
    np.testing.assert_array_equal(images.train.x[1], pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("name", "shape", "given", "size"),
    [
        ("folder", (64, 64), None, 64),
        ("folder", (80, 50), None, 50),
        ("folder", (300, 260), None, 224),
        ("folder", (300, 260), 96, 96),
        ("imagenet", (64, 64), None, 224),
        ("imagenet", (64, 64), 48, 48),
    ],
)
def test_the_image_size_is_the_one_given_or_224_or_that_of_smaller_images(tmp_path, name, shape, given, size):
    images = load_dataset(name, one_size(tmp_path, *shape), image_size=given)
    assert images.test.x.shape[2:] == (size, size)


def test_without_test_images_a_tenth_is_held_out(tmp_path):
    images = load_dataset("folder", write_folder(tmp_path, 20, None), image_size=16, workers=0)
    assert (len(images.train), len(images.test)) == (36, 4)
    assert not set(images.train.files.paths) & set(images.test.files.paths)
    again = load_dataset("folder", tmp_path, image_size=16)
    assert again.test.files.paths == images.test.files.paths


def test_every_class_has_a_tenth_of_its_images_in_the_test_split(tmp_path):
    for name, count in (("cat", 30), ("dog", 2), ("owl", 11), ("yak", 1)):
        write_photographs(tmp_path / name, count)
    images = load_dataset("folder", tmp_path, image_size=16, workers=0)
    assert images.classes == ("cat", "dog", "owl", "yak")
    assert np.bincount(images.test.y, minlength=4).tolist() == [3, 1, 1, 0]
    assert np.bincount(images.train.y).tolist() == [27, 1, 10, 1]


def test_the_statistics_of_a_streamed_set_are_of_images_from_all_over_it(tmp_path, monkeypatch):
    """Its files lie class by class: of the first ones alone they would be those of a class."""
    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (16, 16), (grey,) * 3).save(tmp_path / name / f"{number}.png")
    monkeypatch.setattr("elle.data.image_folder.RESIDENT_BYTES", 0)
    monkeypatch.setattr("elle.data.image_folder._MEASURED", 4)
    images = load_dataset("folder", tmp_path, image_size=16, workers=0)
    assert dataset_statistics("folder", images.train) == ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("classes", "message"),
    [(("cat",), "only the class 'cat'; a classifier needs two"), (("cat", "dog"), "cannot be both trained on and")],
)
def test_one_class_or_one_image_of_each_is_not_enough(tmp_path, classes, message):
    for name in classes:
        (tmp_path / "train" / name).mkdir(parents=True)
        photograph(np.random.default_rng(0), 20, 20).save(tmp_path / "train" / name / "only.png")
    with pytest.raises(InputError, match=message):
        load_dataset("folder", tmp_path)


def test_an_image_size_for_a_set_that_has_its_own_is_refused():
    with pytest.raises(InputError, match="image_size=32: the images of digits have a size of their own"):
        load_dataset("digits", image_size=32)


def test_a_damaged_test_image_is_named(tmp_path):
    write_folder(tmp_path, 2, 2)
    (tmp_path / "val" / "dog" / "001.jpg").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"val/dog/001\.jpg: is no JPEG"):
        _ = load_dataset("folder", tmp_path, image_size=16, workers=0).test.x


def test_a_large_set_is_decoded_into_a_file_that_nobody_has_to_delete(root, tmp_path, monkeypatch):
    small = load_dataset("folder", root, image_size=32, workers=0).test.x
    monkeypatch.setattr("elle.data.image_folder._IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    large = load_dataset("folder", root, image_size=32, workers=0).test.x
    assert isinstance(large, np.memmap)
    np.testing.assert_array_equal(large, small)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_before_anything_is_decoded(root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elle.data.image_folder._IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WorkError, match=r"has no room for .* \(No space left on device\); set TMPDIR"):
        _ = load_dataset("folder", root, image_size=32).test.x


@pytest.mark.parametrize(
    ("loading", "limit", "kind"),
    [
        ("auto", 24 * 3 * 32 * 32, Resident),
        ("auto", 24 * 3 * 32 * 32 - 1, Streaming),
        ("resident", 0, Resident),
        ("streaming", 2**40, Streaming),
    ],
)
def test_a_small_set_is_kept_and_a_large_one_streamed_unless_told_otherwise(root, monkeypatch, loading, limit, kind):
    monkeypatch.setattr("elle.data.image_folder.RESIDENT_BYTES", limit)
    images = load_dataset("folder", root, image_size=32, workers=0)
    source, held_out = training_source(images.train, torch.device("cpu"), loading=loading, **OPTIONS)
    assert isinstance(source, kind)
    assert (len(source), held_out.x.shape) == (20, (4, 3, 32, 32))


def test_both_ways_hold_out_the_same_images(root):
    images = load_dataset("folder", root, image_size=32, workers=0)
    ways = ("resident", "streaming")
    held_out = [training_source(images.train, torch.device("cpu"), loading=way, **OPTIONS)[1] for way in ways]
    np.testing.assert_array_equal(held_out[0].x, held_out[1].x)
    np.testing.assert_array_equal(held_out[0].y, held_out[1].y)


def test_no_images_held_out_are_an_empty_array(root):
    images = load_dataset("folder", root, image_size=32)
    _, held_out = training_source(images.train, torch.device("cpu"), loading="streaming", **OPTIONS | {"validation": 0})
    assert held_out.x.shape == (0, 3, 32, 32)


def test_streaming_decodes_no_training_image_before_the_first_step(root):
    images = load_dataset("folder", root, image_size=32, workers=0)
    training_source(images.train, torch.device("cpu"), loading="streaming", **OPTIONS)
    assert isinstance(images.train, FolderImages)
    assert "x" not in vars(images.train)


@pytest.mark.parametrize(("limit", "count"), [(2**40, 24), (0, 5)])
def test_statistics_come_from_all_images_or_from_some_of_a_streamed_set(root, monkeypatch, limit, count):
    monkeypatch.setattr("elle.data.image_folder.RESIDENT_BYTES", limit)
    monkeypatch.setattr("elle.data.image_folder._MEASURED", 5)
    images = load_dataset("folder", root, image_size=32, workers=0)
    assert len(enough_images(images.train)) == count
    mean, deviation = dataset_statistics("folder", images.train)
    assert len(mean) == len(deviation) == 3
    assert all(0.4 < value < 0.7 for value in mean)


def test_what_only_the_files_can_tell_is_filled_in(root):
    images = load_dataset("folder", root)
    size, open_values = images.train.size, dict.fromkeys(KEYS)
    found = filled_in(images, open_values)
    assert found == {
        **{"image_size": size, "validation": 2, "crop": size // 8, "model": "preact-resnet18"},
        **{"batch": 8, "epochs": 100, "lr": 0.1 * 8 / 128},
    }
    assert filled_in(images, open_values | {"batch": 4, "validation": 0})["lr"] == 0.1 * 4 / 128
    assert filled_in(images, open_values | found) == {}
    assert filled_in(load_dataset("digits"), open_values) == {}


@pytest.mark.parametrize(
    ("count", "size", "model", "batch", "epochs"),
    [
        (60, 224, "resnet18", 8, 100),
        (500, 224, "resnet18", 16, 100),
        (5_000, 224, "resnet18", 64, 43),
        (5_000, 64, "preact-resnet18", 64, 43),
        (100_000, 96, "resnet18", 64, 30),
    ],
)
def test_a_set_s_settings_follow_from_its_number_of_images_and_their_size(count, size, model, batch, epochs):
    files = FolderSplit([Path(f"{k}.jpg") for k in range(count)], np.zeros(count, np.int64))
    images = ImageSet(FolderImages(files, size, None), FolderImages(files, size, None), ("a", "b"))
    found = filled_in(images, dict.fromkeys(KEYS))
    assert (found["model"], found["batch"], found["epochs"]) == (model, batch, epochs)
    assert found["lr"] == 0.1 * batch / 128


@pytest.mark.parametrize("options", [{"loading": "streaming"}, {"cache": "here"}])
def test_what_only_image_files_have_is_refused_for_arrays(options):
    with pytest.raises(InputError, match="leave it out"):
        training_source(load_dataset("digits").train, torch.device("cpu"), **OPTIONS, **options)


def test_a_cache_is_refused_where_nothing_is_streamed(root):
    images = load_dataset("folder", root, image_size=32, workers=0)
    with pytest.raises(InputError, match="cache=here is for image files that are streamed"):
        training_source(images.train, torch.device("cpu"), loading="resident", cache="here", **OPTIONS)
