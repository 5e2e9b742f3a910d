"""The report on a set, and the exact distance between its classes."""

import time
from pathlib import Path

import numpy as np
import pytest

from elle.data import separation as module
from elle.data.check import check
from elle.data.registry import load_dataset
from elle.data.separation import Closest, closest, separation
from elle.data.sources import ImageSet, Split
from elle.errors import InputError

from .layouts import encoded, small_images, write_npz


def save(root, **splits):
    for name, (x, y) in splits.items():
        np.savez(root / f"{name}.npz", x=x, y=y)


def test_a_report_counts_classes_sizes_and_duplicates(tmp_path):
    x, y = small_images(20, (4, 5, 3))
    test, labels = small_images(10, (4, 5, 3), 1)
    test[3], test[7] = x[13], x[2]
    save(tmp_path, train=(x, y), test=(test, labels))
    report = check("arrays", tmp_path)
    train = report["splits"]["train"]
    assert train["images"] == 20
    assert train["per_class"] == {str(number): 2 for number in range(10)}
    assert train["sizes"] == {"5 x 4": 20}
    np.testing.assert_allclose(train["mean"], x.mean((0, 1, 2)) / 255, atol=1e-4)
    np.testing.assert_allclose(train["std"], x.std((0, 1, 2)) / 255, atol=1e-4)
    assert report["duplicates"] == {
        "count": 2,
        "first": [
            {"test": "3", "train": "13", "same_class": True},
            {"test": "7", "train": "2", "same_class": False},
        ],
    }


def test_every_test_image_that_is_a_training_image_is_counted_and_compared_with_all_its_twins(tmp_path):
    x, _ = small_images(4, (4, 5, 3))
    x[1] = x[0]
    test = np.stack([x[0], x[0], x[3], 255 - x[2]])
    save(tmp_path, train=(x, np.array([0, 1, 0, 1])), test=(test, np.array([1, 0, 0, 1])))
    assert check("arrays", tmp_path)["duplicates"] == {
        "count": 3,
        "first": [
            {"test": "0", "train": "0", "same_class": True},
            {"test": "1", "train": "0", "same_class": True},
            {"test": "2", "train": "3", "same_class": False},
        ],
    }


def test_a_report_on_a_folder_lists_every_unreadable_file(tmp_path):
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(3):
                (folder / f"{number}.png").write_bytes(encoded(small_images(1, (8, 8 + number, 3))[0][0], "PNG"))
    damaged = [str(tmp_path / "train" / name) for name in ("cat/0.png", "dog/2.png")]
    for path in damaged:
        Path(path).write_bytes(b"damaged")
    report = check("folder", tmp_path)
    train = report["splits"]["train"]
    assert train["per_class"] == {"cat": 2, "dog": 2}
    assert [line.split(": ")[0] for line in train["unreadable"]] == damaged
    assert report["splits"]["test"]["sizes"] == {"8 x 8": 2, "9 x 8": 2, "10 x 8": 2}
    assert report["splits"]["test"]["unreadable"] == []


def test_a_report_on_cifar10_names_its_classes(tmp_path):
    write_npz(tmp_path)
    report = check("cifar10", tmp_path)
    assert report["classes"][0] == "airplane"
    assert report["splits"]["test"]["per_class"]["truck"] == 2


def brute_force(first: Split, second: Split) -> int:
    a, b = (split.x.reshape(len(split), -1).astype(int) for split in (first, second))
    distances = np.abs(a[:, None] - b[None]).max(2)
    return int(distances[first.y[:, None] != second.y[None]].min())


def some(count, spread, classes, seed, shape=(3, 6, 6)):
    """Images around a few common ones, so that some of different classes are near."""
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 256, (4, *shape))[draw.integers(4, size=count)]
    x = (base + draw.integers(-spread, spread + 1, base.shape)).clip(0, 255).astype(np.uint8)
    return Split(x, draw.integers(classes, size=count))


@pytest.mark.parametrize("spread", [0, 3, 20, 60, 128, 255])
@pytest.mark.parametrize("shape", [(3, 6, 6), (1, 2, 3)])
def test_the_smallest_distance_is_that_of_all_pairs(spread, shape):
    first, second = some(150, spread, 3, 0, shape), some(70, spread, 3, 1, shape)
    for a, b in ((first, first), (second, first)):
        found = closest(a, b)
        i, j = found.images
        assert found.distance == brute_force(a, b)
        assert int(np.abs(a.x[i].astype(int) - b.x[j]).max()) == found.distance
        assert a.y[i] != b.y[j]


def test_the_search_does_not_end_at_the_first_pair_that_is_near_enough():
    """Pairs are compared some thousands at a time: more are candidates here, and the nearest two are found last."""
    x = np.random.default_rng(0).integers(100, 115, (200, 1, 6, 6)).astype(np.uint8)
    x[199] = x[198] + 1
    images = Split(x, np.arange(200) % 2)
    assert closest(images, images) == Closest(1, (198, 199))


def test_blocks_change_nothing(monkeypatch):
    first, second = some(300, 40, 5, 0), some(200, 40, 5, 1)
    whole = [closest(first, first).distance, closest(second, first).distance]
    monkeypatch.setattr(module, "_BLOCK", 64)
    assert [closest(first, first).distance, closest(second, first).distance] == whole


def test_black_and_white_are_as_far_apart_as_can_be():
    x = np.zeros((2, 1, 2, 2), np.uint8)
    x[1] = 255
    assert closest(Split(x, np.array([0, 1])), Split(x, np.array([0, 1]))) == Closest(255, (0, 1))


def test_one_class_has_no_distance():
    x = np.zeros((3, 1, 2, 2), np.uint8)
    one = Split(x, np.zeros(3, np.int64))
    assert closest(one, one) is None
    other = Split(x, np.ones(3, np.int64))
    assert closest(one, other) == Closest(0, (0, 0))


def test_separation_looks_within_training_and_between_the_splits():
    train, test = some(50, 30, 2, 0), some(20, 30, 2, 1)
    found = separation(ImageSet(train, test, ("a", "b")))
    assert {pair: one.distance for pair, one in found.items()} == {
        "train-train": brute_force(train, train),
        "test-train": brute_force(test, train),
    }


@pytest.mark.slow
def test_cifar10_is_as_far_apart_as_published():
    """Yang et al. (arXiv 2003.02460), Table 1: 0.212 within training, 0.220 between test and training."""
    try:
        images = load_dataset("cifar10")
    except InputError as problem:
        pytest.skip(str(problem))
    started = time.process_time()
    assert {pair: one.distance for pair, one in separation(images).items()} == {"train-train": 54, "test-train": 56}
    assert time.process_time() - started < 180
