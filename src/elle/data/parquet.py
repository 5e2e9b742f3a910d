"""Parquet shards as Hugging Face keeps image sets: a column of image files and a column of labels."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.files import MAX_BYTES, Files
from elle.data.folder import decode
from elle.data.sources import ImageSet, Layout, Published, Split, checked_split, join, matching, published_set
from elle.errors import InputError

_IMAGES = ("image", "img")
_LABELS = ("label", "fine_label", "labels")
_MAX_FILE = 2**16
"""Bytes of one image file: 20 times the pixels of the largest images that come this way."""


def parquet_layout(about: Published) -> Layout:
    """train*.parquet and test*.parquet, each in one or more shards."""

    def split(files: Files, pattern: str) -> Split:
        names = matching(files.names(), pattern)
        _check_complete(files.where, names)
        return join([_read(files.where / name, about) for name in names])

    def load(files: Files) -> ImageSet:
        return published_set(about, split(files, "train*.parquet"), split(files, "test*.parquet"), files.where)

    return Layout(("train*.parquet", "test*.parquet"), load)


def _check_complete(folder: Path, names: list[str]) -> None:
    """Shards are called NAME-00000-of-00005.parquet, or with a hash after that: none is missing, none there twice."""
    found = [re.search(r"-(\d{5})-of-(\d{5})(-[0-9a-f]+)?\.parquet$", name) for name in names]
    numbered = [match for match in found if match]
    if not numbered:
        return
    totals = {int(match[2]) for match in numbered}
    total = max(totals)
    there = len({int(match[1]) for match in numbered})
    if there < total:
        raise InputError(f"{folder}: {there} of the {total} shards of {names[0]}; get the others too")
    if len(names) > total or len(totals) > 1:
        listed = ", ".join(names[:5])
        raise InputError(
            f"{folder}: {listed} are not the {total} shards of one set; remove what is a copy or another's"
        )


def _read(path: Path, about: Published) -> Split:
    x: list[npt.NDArray[np.uint8]] = []
    y: list[int] = []
    try:
        for content, label in _rows(path, about):
            name = f"{path}: image {len(y)}"
            if type(label) is not int:
                raise InputError(f"{name}: has no whole number as its label; {about.again}")
            x.append(_image(content, name, about))
            y.append(label)
    except InputError:
        raise
    except Exception as error:  # a damaged file can fail in any way at all
        reason = f"is no parquet file of images, or damaged ({type(error).__name__})"
        raise InputError(f"{path}: {reason}; {about.again}") from None
    if not y:
        raise InputError(f"{path}: holds no images; {about.again}")
    return checked_split(str(path), np.stack(x), np.array(y), len(about.classes), about.again)


def _rows(path: Path, about: Published) -> Iterator[tuple[Any, Any]]:
    """The image file, as pyarrow keeps it, and the label of each row."""
    try:
        from pyarrow import compute, parquet
    except ImportError:
        raise InputError(f"{path}: parquet files need pyarrow; pip install 'elle-at[parquet]'") from None
    image, label = _columns(path, parquet.read_schema(path).names)
    # Dictionaries stay dictionaries: one large image that a million rows refer to is not copied a million times.
    with parquet.ParquetFile(path, read_dictionary=[f"{image}.bytes"]) as file:
        _check_size(path, file.metadata, about)
        for group in range(file.metadata.num_row_groups):  # one by one, as each has a dictionary of its own
            for batch in file.iter_batches(256, [group], [f"{image}.bytes", label], use_threads=False):
                batch.validate(full=True)
                files = batch.column(image)
                longest = compute.max(compute.binary_length(files.field("bytes").dictionary)).as_py() or 0
                if longest > _MAX_FILE:
                    reason = f"holds an image file of {longest} bytes, more than {_MAX_FILE}"
                    raise InputError(f"{path}: {reason}; {about.again}")
                yield from zip(files, batch.column(label).to_pylist(), strict=True)


def _columns(path: Path, names: list[str]) -> tuple[str, str]:
    image = next((name for name in _IMAGES if name in names), None)
    label = next((name for name in _LABELS if name in names), None)
    if image is None or label is None:
        raise InputError(f"{path}: has the columns {', '.join(names)[:80]}, not `image` (or `img`) and `label`")
    return image, label


def _check_size(path: Path, metadata: Any, about: Published) -> None:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    packed = sum(group.total_byte_size for group in groups)
    if max(packed, metadata.num_rows * int(np.prod(about.shape))) > MAX_BYTES or min(packed, metadata.num_rows) < 0:
        raise InputError(f"{path}: claims to hold more than {MAX_BYTES} bytes; {about.again}")


def _image(content: Any, name: str, about: Published) -> npt.NDArray[np.uint8]:
    """One image [C, H, W] of the set's shape."""
    raw = content.as_py()
    raw = raw["bytes"] if isinstance(raw, dict) else raw
    if not isinstance(raw, bytes):
        raise InputError(f"{name}: has no bytes; {about.again}")
    x = decode(raw, name).transpose(2, 0, 1)
    channels, height, width = about.shape
    if x.shape[1:] != (height, width):
        raise InputError(f"{name}: has {x.shape[2]} x {x.shape[1]} pixels, not {width} x {height}; {about.again}")
    if channels == 1 and (x != x[:1]).any():
        raise InputError(f"{name}: is not grey; {about.again}")
    return x[:channels]
