"""What a set holds: counts, sizes, mean and deviation, duplicates between the splits, unreadable files."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.folder import FolderSplit, decode, index_folder
from elle.data.registry import data_folder, load_dataset
from elle.data.sources import Split
from elle.errors import InputError

Image = npt.NDArray[np.uint8]
Item = tuple[str, int, Image | str]
"""An image's name, its label, and the image [C, H, W], or in place of it what is wrong with its file."""
_LISTED = 20


def check(name: str, root: str | Path | None = None) -> dict[str, Any]:
    """A report on the set called `name`; files that cannot be read are listed in it, where each image is a file."""
    if name == "folder":
        index = index_folder(data_folder(root))
        splits = {"train": _files(index.train), "test": _files(index.test) if index.test else iter(())}
        classes = index.classes
    else:
        images = load_dataset(name, root)
        splits = {"train": _images(images.train), "test": _images(images.test)}
        classes = images.classes
    tallies = {split: _Tally(items, len(classes)) for split, items in splits.items()}
    train, test = tallies["train"], tallies["test"]
    shared = [
        {"test": name, "train": train.names[digest], "same_class": test.labels[digest] == train.labels[digest]}
        for digest, name in test.names.items()
        if digest in train.names
    ]
    return {
        "name": name,
        "classes": list(classes),
        "splits": {split: tally.report(classes) for split, tally in tallies.items()},
        "duplicates": {"count": len(shared), "first": shared[:_LISTED]},
    }


def _images(split: Split) -> Iterator[Item]:
    for number, (image, label) in enumerate(zip(split.x, split.y.tolist(), strict=True)):
        yield str(number), label, image


def _files(split: FolderSplit) -> Iterator[Item]:
    for path, label in zip(split.paths, split.y.tolist(), strict=True):
        try:
            yield str(path), label, decode(path, str(path)).transpose(2, 0, 1)
        except InputError as problem:
            yield str(path), label, str(problem)


class _Tally:
    """One split counted, an image at a time."""

    def __init__(self, items: Iterator[Item], classes: int) -> None:
        self.counts = np.zeros(classes, np.int64)
        self.sizes: Counter[str] = Counter()
        self.sums: npt.NDArray[np.float64] = np.zeros((3, 0))
        self.unreadable: list[str] = []
        self.names: dict[bytes, str] = {}
        self.labels: dict[bytes, int] = {}
        for name, label, image in items:
            if isinstance(image, str):
                self.unreadable.append(image)
            else:
                self._add(name, label, image)

    def _add(self, name: str, label: int, image: Image) -> None:
        channels, height, width = image.shape
        self.counts[label] += 1
        self.sizes[f"{width} x {height}"] += 1
        flat = image.reshape(channels, -1).astype(np.float32)
        moments = np.stack([np.full(channels, flat.shape[1]), flat.sum(1), (flat * flat).sum(1)])
        self.sums = moments.astype(np.float64) + (self.sums if self.sums.size else 0)
        digest = hashlib.blake2b(image.tobytes(), digest_size=16, key=str(image.shape).encode()).digest()
        self.names.setdefault(digest, name)
        self.labels.setdefault(digest, label)

    def report(self, classes: tuple[str, ...]) -> dict[str, Any]:
        count = np.maximum(self.sums[0], 1)
        mean = self.sums[1] / count
        deviation = np.sqrt(np.maximum(self.sums[2] / count - mean * mean, 0))
        return {
            "images": int(self.counts.sum()),
            "per_class": dict(zip(classes, self.counts.tolist(), strict=True)),
            "sizes": dict(self.sizes.most_common(_LISTED)),
            "mean": [round(float(value) / 255, 4) for value in mean],
            "std": [round(float(value) / 255, 4) for value in deviation],
            "unreadable": self.unreadable,
        }
