"""Image folders: which files, which classes, and every image as RGB, or an error that names the file."""

import io
import os
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from elle.data import folder as folder_module
from elle.data.folder import decode, index_folder
from elle.data.registry import load_dataset

from .layouts import encoded, small_images
from .refusing import assert_refused

CLASSES = ("n01", "n02", "n03")


def write_image(path, seed=0, kind="PNG", shape=(6, 5, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(small_images(1, shape, seed)[0][0], kind))


def write_imagenet(root, splits=("train", "val"), below=""):
    for split in splits:
        for name in CLASSES:
            for number, (suffix, kind) in enumerate((("JPEG", "JPEG"), ("png", "PNG"), ("WebP", "WEBP"))):
                write_image(root / split / name / below / f"{name}_{number}.{suffix}", number, kind)
    return root


def write_tiny(root):
    """Tiny-ImageNet: train/CLASS/images/, boxes beside them, val/ by a list, test/ without labels."""
    write_imagenet(root, ("train",), "images")
    (root / "train" / "n01" / "n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t5\t5\n")
    lines = []
    for number in range(6):
        write_image(root / "val" / "images" / f"val_{number}.JPEG", number, "JPEG")
        lines.append(f"val_{number}.JPEG\t{CLASSES[number % 2 + 1]}\t0\t0\t5\t5\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    write_image(root / "test" / "images" / "test_0.JPEG", 9, "JPEG")
    (root / "words.txt").write_text("n00\tentity\nn01\tcrane, machine\nn02\tcrane\nn03\tgoldfish, Carassius auratus\n")
    return root


def test_imagenet_is_listed_in_order_with_its_classes(tmp_path):
    index = index_folder(write_imagenet(tmp_path))
    assert index.classes == CLASSES
    assert index.train.y.tolist() == index.test.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert index.train.y.dtype == np.int64
    assert index.train.paths == sorted(index.train.paths)
    assert all(path.parent.name == CLASSES[label] for path, label in zip(index.test.paths, index.test.y, strict=True))
    assert {path.parent.parent.name for path in index.test.paths} == {"val"}


def test_tiny_imagenet_is_listed_with_its_words(tmp_path):
    index = index_folder(write_tiny(tmp_path))
    assert index.classes == ("crane (n01)", "crane (n02)", "goldfish")
    assert (len(index.train), len(index.test)) == (9, 6)
    assert index.test.y.tolist() == [1, 2, 1, 2, 1, 2]
    assert [path.name for path in index.test.paths] == [f"val_{number}.JPEG" for number in range(6)]


def test_a_labelled_test_folder_is_taken_before_val(tmp_path):
    index = index_folder(write_imagenet(tmp_path, ("train", "val", "test")))
    assert {path.parent.parent.name for path in index.test.paths} == {"test"}


@pytest.mark.parametrize(
    ("splits", "unread"),
    [
        (("train", "val"), None),
        (("train", "valid"), "left out: 'valid', as test images are read from test/, or else from val/"),
        (("train", "test", "valid"), "left out: 'valid', as"),
        (("train", "test", "val"), "left out: 'val', as"),
        (("train", "Test", "Validation"), "left out: 'Test', 'Validation', as"),
    ],
)
def test_a_split_that_is_not_read_is_named(tmp_path, splits, unread):
    (write_imagenet(tmp_path, splits) / "validation").mkdir()  # without classes
    told = index_folder(tmp_path).skipped()
    assert told == unread or told.startswith(unread)


@pytest.mark.parametrize("splits", [("Training", "Testing"), ("Train", "valid"), ("TRAIN",)])
def test_splits_of_other_names_are_not_taken_for_classes(tmp_path, splits):
    root = write_imagenet(tmp_path, splits)
    assert_refused(lambda: index_folder(root), repr(splits[0]), "look like splits, not classes", "train/CLASS")


def test_without_a_second_split_there_is_no_test(tmp_path):
    assert index_folder(write_imagenet(tmp_path, ("train",))).test is None


def test_other_files_and_hidden_ones_are_passed_over(tmp_path):
    write_imagenet(tmp_path)
    (tmp_path / "train" / "n01" / "._n01_0.JPEG").write_text("resource fork")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("notes")
    (tmp_path / "train" / ".cache").mkdir()
    copies = tmp_path / "train" / "n01" / ".ipynb_checkpoints"
    copies.mkdir()
    shutil.copy(index_folder(tmp_path).train.paths[0], copies / "n01_0-checkpoint.JPEG")
    assert len(index_folder(tmp_path).train) == 9


def test_a_folder_in_a_class_may_be_a_link_even_one_that_leads_back(tmp_path):
    write_imagenet(tmp_path / "photos")
    place = tmp_path / "photos" / "train" / "n01"
    (tmp_path / "more" / "deep").mkdir(parents=True)
    shutil.copy(index_folder(tmp_path / "photos").train.paths[0], tmp_path / "more" / "deep" / "more.jpg")
    (place / "linked").symlink_to(tmp_path / "more")
    (place / "itself").symlink_to(place)
    (place / "all").symlink_to(tmp_path)
    (tmp_path / "more" / "back").symlink_to(tmp_path / "photos" / "train")
    train = index_folder(tmp_path / "photos").train
    assert len(train) == 10
    assert train.paths.count(place / "linked" / "deep" / "more.jpg") == 1


def test_missing_unknown_and_empty_classes_are_named(tmp_path):
    root = write_imagenet(tmp_path)
    for path in (root / "val" / "n02").iterdir():
        path.unlink()
    assert_refused(lambda: index_folder(root), root / "val", "'n02'", "no JPEG, PNG or WebP", "add some, or remove")
    (root / "val" / "n02").rmdir()
    assert_refused(lambda: index_folder(root), root / "val", "no folder for the class 'n02'")
    write_image(root / "val" / "n02" / "a.png")
    write_image(root / "val" / "n77" / "a.png")
    assert_refused(lambda: index_folder(root), root / "val", "'n77'", "no class of train/")
    (root / "train" / "n00").mkdir()
    assert_refused(lambda: index_folder(root), "'n00'")


def test_a_root_without_classes_says_the_layout(tmp_path):
    assert_refused(lambda: index_folder(tmp_path / "nowhere"), tmp_path / "nowhere: no such folder", "train/CLASS")
    assert_refused(lambda: index_folder(tmp_path), f"{tmp_path}: no class folders", "train/CLASS")
    (tmp_path / "train").mkdir()
    assert_refused(lambda: index_folder(tmp_path), tmp_path / "train: no class folders", "train/CLASS")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("val_3", "val_9"), ["line 4", "val_9.JPEG"]),
        (lambda text: text.replace("n03", "n99"), ["line 2", "n99"]),
        (lambda text: text.rpartition("val_5")[0], ["no class for 'val_5.JPEG'"]),
        (lambda text: text + text, ["line 7"]),
    ],
)
def test_wrong_annotations_are_named(tmp_path, change, words):
    notes = write_tiny(tmp_path) / "val" / "val_annotations.txt"
    notes.write_text(change(notes.read_text()))
    assert_refused(lambda: index_folder(tmp_path), notes, *words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    root = write_imagenet(tmp_path)
    (root / "train" / "n02").chmod(0)
    assert_refused(lambda: index_folder(root), root / "train" / "n02", "permissions")


def test_images_become_arrays_with_the_classes_of_their_folders(tmp_path):
    root = tmp_path
    for split, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(count):
                seed = number + 10 * (name == "dog")
                write_image(root / split / name / f"{number}.png", seed, shape=(5, 5, 3))
    images = load_dataset("folder", root)
    assert images.classes == ("cat", "dog")
    assert (images.train.x.shape, images.test.y.tolist()) == ((8, 3, 5, 5), [0, 0, 1, 1])
    np.testing.assert_array_equal(images.train.x[6], small_images(1, (5, 5, 3), 12)[0][0].transpose(2, 0, 1))


PIXELS = small_images(1, (6, 5, 3))[0][0]


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_kind_of_pixel_becomes_rgb():
    grey = Image.fromarray(PIXELS[..., 0])
    rgba = Image.fromarray(np.dstack([PIXELS, np.full((6, 5), 128, np.uint8)]))
    deep = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 256 + 7)
    three = np.repeat(PIXELS[..., :1], 3, axis=2)
    palette = Image.fromarray(PIXELS).quantize(256)
    for raw, wanted in (
        (encoded(PIXELS, "PNG"), PIXELS),
        (saved(grey, "PNG"), three),
        (saved(deep, "PNG"), three),
        (saved(rgba, "PNG"), PIXELS),
        (saved(rgba, "WEBP", lossless=True, exact=True), PIXELS),
        (saved(palette, "PNG"), np.array(palette.convert("RGB"))),
        (saved(palette, "PNG", transparency=bytes(range(256))), np.array(palette.convert("RGB"))),
        (saved(grey.convert("1"), "PNG"), np.array(grey.convert("1").convert("RGB"))),
    ):
        found = decode(raw, "image")
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, wanted)


def test_cmyk_photographs_become_rgb():
    flat = Image.new("RGB", (16, 16), (200, 40, 90))
    found = decode(saved(flat.convert("CMYK"), "JPEG", quality=100), "image")
    assert found.shape == (16, 16, 3)
    assert np.abs(found.astype(int) - [200, 40, 90]).max() < 6


def png_of(width, height):
    """The head of a PNG that claims any size, with a few bytes of pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")


def test_decompression_bombs_are_refused_by_their_header():
    assert_refused(lambda: decode(png_of(9000, 8000), "large.png"), "large.png", "9000 x 8000 pixels")
    assert_refused(lambda: decode(png_of(2**31 - 1, 2**31 - 1), "large.png"), "large.png")


@pytest.mark.parametrize(("kind", "cut"), [("PNG", 40), ("PNG", -60), ("JPEG", 100), ("JPEG", -40), ("WEBP", 30)])
def test_cut_images_are_named(tmp_path, kind, cut):
    path = tmp_path / "image"
    path.write_bytes(encoded(small_images(1, (32, 32, 3))[0][0], kind)[:cut])
    assert_refused(lambda: decode(path, str(path)), path, "replace or remove it")


def test_what_is_no_image_or_another_format_is_named(tmp_path):
    assert_refused(lambda: decode(b"", "empty"), "empty", "no JPEG, PNG or WebP")
    assert_refused(lambda: decode(saved(Image.fromarray(PIXELS), "GIF"), "a.png"), "a.png", "no JPEG, PNG or WebP")
    assert_refused(lambda: decode(tmp_path / "absent.png", "absent.png"), "absent.png", "No such file")


def test_the_largest_image_is_bounded_below_what_pillow_warns_of():
    assert folder_module.MAX_PIXELS < Image.MAX_IMAGE_PIXELS


def test_class_folders_alone_are_the_training_split(tmp_path):
    for name in CLASSES:
        write_image(tmp_path / name / "a.png")
    found = index_folder(tmp_path)
    assert (len(found.train), found.test, found.classes) == (3, None, CLASSES)


def test_a_folder_with_a_test_split_needs_a_train_split(tmp_path):
    write_imagenet(tmp_path, ("val",))
    assert_refused(lambda: index_folder(tmp_path), tmp_path / "train", "no such folder", "train/CLASS")
