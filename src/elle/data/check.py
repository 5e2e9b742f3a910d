"""What a set holds: counts, sizes, mean and deviation, duplicates between the splits, unreadable files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.cores import usable_cores
from elle.data.folder import FolderSplit, decode, index_folder
from elle.data.image_folder import train_and_test
from elle.data.registry import data_folder, find_dataset, load_dataset, naming_the_folder
from elle.data.sources import Split
from elle.errors import InputError

Image = npt.NDArray[np.uint8]
_LISTED = 20
_CHUNK = 256
"""Files that are read at a time."""


@dataclass(frozen=True)
class _Measured:
    """One image [C, H, W]: its size, for each channel [3, C] the count, sum and sum of squares, and a hash of it."""

    size: str
    moments: npt.NDArray[np.int64]
    digest: bytes


Item = tuple[str, int, _Measured | str]
"""An image's name, its label, and what was measured, or in place of it what is wrong with its file."""


def check(name: str, root: str | Path | None = None) -> dict[str, Any]:
    """A report on the set called `name`; files that cannot be read are listed in it, where each image is a file."""
    if find_dataset(name).files:
        with naming_the_folder(root):
            index = index_folder(data_folder(root))
        splits = {split: _files(one) for split, one in zip(("train", "test"), train_and_test(index), strict=True)}
        classes, skipped, held_out = index.classes, index.skipped(), index.test is None
    else:
        images = load_dataset(name, root)
        splits = {"train": _images(images.train), "test": _images(images.test)}
        classes, skipped, held_out = images.classes, None, images.held_out
    tallies = {split: _Tally(items, len(classes)) for split, items in splits.items()}
    shared = _shared(tallies["test"], tallies["train"])
    return {
        "name": name,
        "classes": list(classes),
        "splits": {split: tally.report(classes) for split, tally in tallies.items()},
        "held_out": held_out,
        "skipped": skipped,
        "duplicates": {"count": len(shared), "first": shared[:_LISTED]},
    }


def _shared(test: _Tally, train: _Tally) -> list[dict[str, Any]]:
    """Every test image that is also a training image, with the first of those, and whether any has its class."""
    return [
        {"test": name, "train": twins[0][0], "same_class": label in {other for _, other in twins}}
        for digest, ones in test.found.items()
        if (twins := train.found.get(digest))
        for name, label in ones
    ]


def _images(split: Split) -> Iterator[Item]:
    for number, (image, label) in enumerate(zip(split.x, split.y.tolist(), strict=True)):
        yield str(number), label, _measured(image)


def _files(split: FolderSplit) -> Iterator[Item]:
    """The files in order, read by a thread for each core: decoding and hashing leave Python's lock alone."""
    labels = split.y.tolist()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, len(split), _CHUNK):  # not all at once: each waits in memory until it is counted
            chunk = slice(first, first + _CHUNK)
            yield from pool.map(_file, split.paths[chunk], labels[chunk])


def _file(path: Path, label: int) -> Item:
    try:
        return str(path), label, _measured(decode(path, str(path)).transpose(2, 0, 1))
    except InputError as problem:
        return str(path), label, str(problem)


def _measured(image: Image) -> _Measured:
    channels, height, width = image.shape
    flat = image.reshape(channels, -1).astype(np.int64)
    moments = np.stack([np.full(channels, flat.shape[1]), flat.sum(1), (flat * flat).sum(1)])
    digest = hashlib.blake2b(image.tobytes(), digest_size=16, key=str(image.shape).encode()).digest()
    return _Measured(f"{width} x {height}", moments, digest)


class _Tally:
    """One split counted, an image at a time."""

    def __init__(self, items: Iterator[Item], classes: int) -> None:
        self.counts = np.zeros(classes, np.int64)
        self.sizes: Counter[str] = Counter()
        self.sums: npt.NDArray[np.int64] = np.zeros((3, 0), np.int64)
        self.unreadable: list[str] = []
        self.found: dict[bytes, list[tuple[str, int]]] = {}
        """By hash: the names and labels of the images that are alike."""
        for name, label, one in items:
            if isinstance(one, str):
                self.unreadable.append(one)
                continue
            self.counts[label] += 1
            self.sizes[one.size] += 1
            self.sums = one.moments + self.sums if self.sums.size else one.moments
            self.found.setdefault(one.digest, []).append((name, label))

    def report(self, classes: tuple[str, ...]) -> dict[str, Any]:
        count = np.maximum(self.sums[0], 1)
        mean = self.sums[1] / count
        deviation = np.sqrt(np.maximum(self.sums[2] / count - mean * mean, 0))
        return {
            "images": int(self.counts.sum()),
            "per_class": dict(zip(classes, self.counts.tolist(), strict=True)),
            "sizes": dict(self.sizes.most_common(_LISTED)),
            "different_sizes": len(self.sizes),
            "mean": [round(float(value) / 255, 4) for value in mean],
            "std": [round(float(value) / 255, 4) for value in deviation],
            "unreadable": self.unreadable,
        }
