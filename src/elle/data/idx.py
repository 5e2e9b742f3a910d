"""MNIST and Fashion-MNIST: idx files, plain or .gz, of one channel."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.arrays import npz_layout
from elle.data.files import MAX_BYTES, Files, inflate
from elle.data.parquet import parquet_layout
from elle.data.sources import ImageSet, Layout, Published, Split, checked_split, load_published, matching
from elle.errors import InputError

MNIST = Published(
    "mnist",
    "MNIST",
    (1, 28, 28),
    tuple("0123456789"),
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ("mnist", "MNIST", "MNIST/raw", "raw"),
)
FASHION_MNIST = Published(
    "fashion-mnist",
    "Fashion-MNIST",
    (1, 28, 28),
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    "https://github.com/zalandoresearch/fashion-mnist",
    ("fashion-mnist", "fashion_mnist", "FashionMNIST", "FashionMNIST/raw", "raw"),
)
_FILES = tuple(f"{split}-{kind}-ubyte*" for split in ("train", "t10k") for kind in ("images?idx3", "labels?idx1"))


def mnist(root: Path) -> ImageSet:
    """MNIST from its idx files, npz files or parquet shards, in `root` or below."""
    return load_published(MNIST, _layouts(MNIST), root)


def fashion_mnist(root: Path) -> ImageSet:
    """Fashion-MNIST from its idx files, npz files or parquet shards, in `root` or below."""
    return load_published(FASHION_MNIST, _layouts(FASHION_MNIST), root)


def _layouts(about: Published) -> list[Layout]:
    def split(files: Files, images: str, labels: str) -> Split:
        names = files.names()
        image_name, label_name = (matching(names, pattern)[0] for pattern in (images, labels))
        x = read_idx(files.read(image_name), files.label(image_name), 3)
        y = read_idx(files.read(label_name), files.label(label_name), 1)
        if x.shape[1:] != about.shape[1:]:
            raise InputError(
                f"{files.label(image_name)}: images of {x.shape[1]} x {x.shape[2]} pixels, not 28 x 28; {about.again}"
            )
        return checked_split(files.label(image_name), x[:, None], y, len(about.classes), about.again)

    def load(files: Files) -> ImageSet:
        return ImageSet(split(files, *_FILES[:2]), split(files, *_FILES[2:]), about.classes)

    return [Layout(_FILES, load), npz_layout(about), parquet_layout(about)]


def read_idx(raw: bytes, name: str, dimensions: int) -> npt.NDArray[Any]:
    """An array of bytes: 0, 0, 8 for uint8, the number of dimensions, each as 4 bytes, and the contents."""
    start = 4 + 4 * dimensions
    gzipped = raw[:2] == b"\x1f\x8b"
    header = inflate(raw, start, name, gzipped=True) if gzipped else raw[:start]
    if len(header) < start or header[:4] != bytes([0, 0, 8, dimensions]):
        raise InputError(f"{name}: is no idx file of bytes with {dimensions} dimensions; get the file again")
    shape = tuple(int.from_bytes(header[4 + 4 * d : 8 + 4 * d], "big") for d in range(dimensions))
    size = start + math.prod(shape)
    if size > MAX_BYTES:
        raise InputError(f"{name}: claims to hold {size} bytes, more than {MAX_BYTES}; get the file again")
    content = inflate(raw, size + 1, name, gzipped=True) if gzipped else raw
    if len(content) != size:
        raise InputError(f"{name}: does not hold the {size} bytes its header claims; get the file again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
