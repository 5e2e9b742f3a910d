"""SVHN: cropped digits in MATLAB's format, version 5."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.arrays import npz_layout
from elle.data.files import MAX_BYTES, Files, inflate
from elle.data.parquet import parquet_layout
from elle.data.sources import ImageSet, Layout, Published, Split, checked_split, describe, load_published
from elle.errors import InputError

SVHN = Published(
    "svhn",
    "SVHN",
    (3, 32, 32),
    tuple("0123456789"),
    "http://ufldl.stanford.edu/housenumbers/",
    ("svhn", "SVHN", "cropped_digits"),
)
# The number types a MATLAB element may have; a matrix of them may be packed in a smaller type than its own.
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_NUMERIC_CLASSES = range(6, 16)
_HEADER = 128


def svhn(root: Path) -> ImageSet:
    """SVHN from train_32x32.mat and test_32x32.mat, npz files or parquet shards, in `root` or below."""
    files = ("train_32x32.mat", "test_32x32.mat")
    layouts = [Layout(files, _load), npz_layout(SVHN), parquet_layout(SVHN)]
    return load_published(SVHN, layouts, root)


def _load(files: Files) -> ImageSet:
    return ImageSet(_split(files, "train_32x32.mat"), _split(files, "test_32x32.mat"), SVHN.classes)


def _split(files: Files, file: str) -> Split:
    """`X`, uint8 [32, 32, 3, N], and `y`, [N, 1], where label 10 is the digit 0."""
    name = files.label(file)
    matrices = read_mat(files.read(file), name, ("X", "y"))
    x, y = matrices["X"], matrices["y"]
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise InputError(f"{name}: `X` is {describe(x)}, not uint8 [32, 32, 3, N]; {SVHN.again}")
    y = y.reshape(-1)
    if not np.isin(y, np.arange(1, 11)).all():
        raise InputError(f"{name}: `y` has labels that are not 1 to 10; {SVHN.again}")
    return checked_split(name, x.transpose(3, 2, 0, 1), y.astype(np.int64) % 10, 10, SVHN.again)


def read_mat(raw: bytes, name: str, wanted: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    """The wanted numeric matrices of a MATLAB 5 file, every size checked against the bytes there are."""
    if raw[:10] == b"MATLAB 7.3":
        raise InputError(f"{name}: is a MATLAB 7.3 file; save it with `-v7`, or {SVHN.again}")
    order = {b"IM": "<", b"MI": ">"}.get(raw[126:128])
    if order is None:
        raise InputError(f"{name}: is no MATLAB 5 file; {SVHN.again}")
    found: dict[str, npt.NDArray[Any]] = {}
    left = MAX_BYTES
    try:
        for kind, content in _elements(memoryview(raw)[_HEADER:], order):
            if kind == _COMPRESSED:
                kind, content = _inflated(content, order, left, name)
                left -= len(content)
            if kind == _MATRIX:
                _add_matrix(found, content, order, wanted)
            if all(key in found for key in wanted):
                return found
    except InputError:
        raise
    except (ValueError, IndexError, StopIteration, KeyError) as error:
        raise InputError(f"{name}: is cut short or damaged ({type(error).__name__}); {SVHN.again}") from None
    missing = ", ".join(f"`{key}`" for key in wanted if key not in found)
    raise InputError(f"{name}: holds no matrix {missing}; {SVHN.again}")


def _inflated(content: memoryview, order: str, left: int, name: str) -> tuple[int, memoryview]:
    """The one element in a compressed one, whose own size says how much there is to unpack."""
    kind, size = np.frombuffer(inflate(content, 8, name), f"{order}u4").tolist()
    if size > left:
        raise InputError(f"{name}: unpacks to more than {MAX_BYTES} bytes; {SVHN.again}")
    # More than there is, but for what may fill the last 8 bytes: only so is the checksum reached, which follows.
    whole = inflate(content, 8 + size + 8, name)
    if len(whole) == 8 + size + 8:
        raise ValueError("more than its size")
    return kind, memoryview(whole)[8 : 8 + size]


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(type, contents) of each element: 8 bytes of head, or 4 of head and 4 of contents where they are so few."""
    while len(data) >= 8:
        kind, size = np.frombuffer(data[:8], f"{order}u4").tolist()
        if kind >> 16:
            kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
        else:
            # Inside a matrix elements fill multiples of 8 bytes; a compressed element is not padded.
            start, end = 8, 8 + size + (-size % 8 if kind != _COMPRESSED else 0)
        if start + size > len(data):
            raise ValueError("an element beyond the end")
        yield kind, data[start : start + size]
        data = data[end:]


def _add_matrix(found: dict[str, npt.NDArray[Any]], content: memoryview, order: str, wanted: tuple[str, ...]) -> None:
    """A matrix is its flags, its shape, its name and its numbers, in columns."""
    parts = _elements(content, order)
    flags = np.frombuffer(next(parts)[1], f"{order}u4")
    shape = np.frombuffer(next(parts)[1], f"{order}i4").tolist()
    key = bytes(next(parts)[1]).decode("latin1")
    if key not in wanted or int(flags[0]) & 0xFF not in _NUMERIC_CLASSES:
        return
    kind, numbers = next(parts)
    values = np.frombuffer(numbers, order + _NUMBERS[kind])
    if min(shape) < 0 or len(shape) > 8 or math.prod(shape) != len(values):
        raise ValueError("a shape that does not fit its numbers")
    found[key] = values.reshape(shape, order="F")
