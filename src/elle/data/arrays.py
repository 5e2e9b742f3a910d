"""NumPy files: train.npz and test.npz, or pairs of .npy files, of a published set or of a user's own."""

import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from elle.data.files import Files, Folder
from elle.data.sources import (
    MAX_ARRAY,
    ImageSet,
    Layout,
    Published,
    Split,
    apart,
    checked_split,
    describe,
    published_set,
)
from elle.errors import InputError

_SPLITS = ("train", "test")
_WRITE = "write it with numpy.savez(file, x=images, y=labels)"
_LAYOUTS = (
    "give train.npz and test.npz with x and y; x_train.npy, y_train.npy, x_test.npy, y_test.npy; "
    "or root=FILE.npz with x_train, y_train, x_test, y_test"
)


def npz_layout(about: Published) -> Layout:
    """train.npz and test.npz with `x`, uint8 [N, H, W, C], and `y`, integers [N], of a published set."""
    channels, height, width = about.shape
    shape = (height, width, channels)

    def split(path: Path) -> Split:
        x, y = _pair(path, *read_npz(path, ("x", "y")))
        if x.shape[1:] != shape and not (channels == 1 and x.shape[1:] == shape[:2]):
            wanted = ", ".join(map(str, shape))
            raise InputError(f"{path}: `x` is {describe(x)}, not uint8 [N, {wanted}]; {_WRITE}")
        return checked_split(str(path), x.reshape(-1, *shape).transpose(0, 3, 1, 2), y, len(about.classes), about.again)

    def load(files: Files) -> ImageSet:
        return published_set(about, split(files.where / "train.npz"), split(files.where / "test.npz"), files.where)

    return Layout(("train.npz", "test.npz"), load)


def own_arrays(root: Path) -> ImageSet:
    """A user's own arrays; the classes are named by classes.txt, one a line, otherwise by their numbers."""
    names = Folder(root).names()
    if root.is_file() and root.suffix == ".npz":
        keys = [f"{part}_{split}" for split in _SPLITS for part in "xy"]
        arrays = read_npz(root, keys)
        pairs = [(root, arrays[0], arrays[1]), (root, arrays[2], arrays[3])]
    elif {"train.npz", "test.npz"} <= set(names):
        files = [root / f"{split}.npz" for split in _SPLITS]
        pairs = [(file, x, y) for file in files for x, y in [read_npz(file, ("x", "y"))]]
    elif {f"{part}_{split}.npy" for split in _SPLITS for part in "xy"} <= set(names):
        pairs = [
            (root / f"x_{split}.npy", read_npy(root / f"x_{split}.npy"), read_npy(root / f"y_{split}.npy"))
            for split in _SPLITS
        ]
    else:
        there = "" if root.exists() else " (no such folder)"
        raise InputError(f"no arrays in {root}{there}; {_LAYOUTS}")
    checked = [(path, *_pair(path, x, y)) for path, x, y in pairs]
    classes = _classes(root if root.is_dir() else root.parent, checked[0][2])
    train, test = (
        checked_split(str(path), _channels_first(path, x), y, len(classes), _WRITE) for path, x, y in checked
    )
    if train.x.shape[1:] != test.x.shape[1:]:
        raise InputError(
            f"{root}: training images are {train.x.shape[1:]}, test images {test.x.shape[1:]}; make them alike"
        )
    if (train.y == train.y[0]).all():
        raise InputError(f"{root}: only the class {classes[train.y[0]]!r}; a classifier needs two classes or more")
    if (least := int(min(train.y.min(), test.y.min()))) > 0:
        raise InputError(f"{root}: the labels begin at {least}, and there is no image of class 0; subtract {least}")
    return ImageSet(train, test, classes)


def _pair(path: Path, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        how = "multiply images in [0, 1] by 255 and convert them to uint8" if x.dtype.kind == "f" else _WRITE
        raise InputError(f"{path}: `x` is {describe(x)}, not uint8 [N, H, W, C] with values 0 to 255; {how}")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise InputError(f"{path}: `y` is {describe(y)}, not integers [N]; {_WRITE}")
    return x, y


def _channels_first(path: Path, x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[N, H, W], [N, H, W, C] or [N, C, H, W] as the last, for one or three channels."""
    if x.ndim == 3:
        return x[:, None]
    first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
    if first == last or 0 in x.shape[1:]:
        raise InputError(f"{path}: `x` is {describe(x)}; its images need 1 or 3 channels, first or last; {_WRITE}")
    return x if first else x.transpose(0, 3, 1, 2)


def _classes(folder: Path, y: npt.NDArray[Any]) -> tuple[str, ...]:
    # The bound keeps one wild label from asking for a network of 10^18 classes.
    count = int(y.max()) + 1 if len(y) and y.max() < len(y) else len(y)
    file = folder / "classes.txt"
    if not file.is_file():
        return tuple(map(str, range(count)))
    try:
        # -sig: some editors begin a file with a mark, which would be part of the first name.
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{file}: is not readable as text; write one class name a line") from None
    names = [line.strip() for line in lines if line.strip()]
    if len(names) < count:
        raise InputError(f"{file}: names {len(names)} classes, but the labels go up to {count - 1}; write one a line")
    return apart(names, range(len(names)))


def read_npz(path: Path, names: tuple[str, ...] | list[str]) -> list[npt.NDArray[Any]]:
    """The named arrays of a .npz file; nothing else in it is read, and no object is ever made of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = []
            for name in names:
                info = archive.getinfo(f"{name}.npy")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError("not compressed as NumPy does it")
                with archive.open(info) as stream:
                    found.append(_array(stream, info.file_size))
            return found
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # a damaged archive can fail in any way at all
        wanted = " and ".join(f"`{name}`" for name in names)
        advice = _WRITE if "x" in names else _LAYOUTS
        raise InputError(f"{path}: no arrays {wanted} in it ({_reason(error)}); {advice}") from None


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array of plain numbers in a .npy file."""
    try:
        with open(path, "rb") as stream:
            return _array(stream, os.fstat(stream.fileno()).st_size)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: no array in it ({_reason(error)}); write it with numpy.save(file, array)") from None


def _reason(error: Exception) -> str:
    said = isinstance(error, ValueError) and len(str(error)) < 60
    return str(error) if said and str(error).isprintable() else type(error).__name__


def _array(stream: IO[bytes], size: int) -> npt.NDArray[Any]:
    """An array whose header's claims are checked against the bytes there are, before memory is asked for."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran, dtype = readers[version](stream)
    if dtype.kind not in "biuf":
        raise ValueError("not an array of plain numbers")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != size - stream.tell():
        raise ValueError(f"its header claims {claimed} bytes, not those it has")
    if claimed > MAX_ARRAY:
        raise InputError(
            f"an array of {claimed} bytes; at most {MAX_ARRAY} are held in memory; "
            f"write the images as files, which data=folder streams"
        )
    raw = np.empty(claimed, np.uint8)
    view = raw.data
    while view:
        got = stream.readinto(view[: 2**26])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("cut short")
        view = view[got:]
    return raw.view(dtype).reshape(shape, order="F" if fortran else "C")
