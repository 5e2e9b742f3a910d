"""Image sets as arrays, and the search for the files they come in."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.files import Files, Folder, open_archive
from elle.errors import InputError

MAX_ARRAY = 2**33
"""Bytes of one array: a set that is held whole on the device; larger ones are streamed from an image folder."""


@dataclass(frozen=True)
class Split:
    """Images x uint8 [N, C, H, W] and their labels y int64 [N]."""

    x: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def first(self, count: int) -> "Split":
        # A view: the layout in memory decides the last bits of what is computed from it.
        return Split(self.x[:count], self.y[:count])

    def part(self, numbers: npt.NDArray[np.int64]) -> "Split":
        return Split(self.x[numbers], self.y[numbers])


def spread_images(data: Split, count: int) -> Split:
    """So many images, or all, spread over the set, which may be sorted by class; no others are decoded."""
    return data.part(np.unique(np.linspace(0, len(data) - 1, count).astype(np.int64)))


def some_images(data: Split, count: int | None) -> tuple[Split, npt.NDArray[np.int64]]:
    """The first `count` images, or all, and their numbers; no others are decoded.

    Of a set that lies class by class, so many spread over it: the first ones would be of its first class alone.
    """
    total = len(data)
    if count is None or count >= total:
        return data, np.arange(total)
    if np.count_nonzero(np.diff(data.y)) == len(np.unique(data.y)) - 1:  # each class lies in one piece
        numbers = np.arange(count) * total // count
        return data.part(numbers), numbers
    return data.first(count), np.arange(count)


@dataclass(frozen=True)
class ImageSet:
    """A training and a test split, with the names of the classes."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    skipped: str | None = None
    """What to tell of folders and files that were left out, in a line each."""
    held_out: bool = False
    """Whether the test images were drawn from the others, which had no test split."""


@dataclass(frozen=True)
class Published:
    """What is known of a set before any file is read: its images' shape [C, H, W], its classes, where to get it."""

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    page: str
    folders: tuple[str, ...]
    """Below the root, where its files are looked for too."""

    @property
    def again(self) -> str:
        return f"get the file again from {self.page}"


@dataclass(frozen=True)
class Layout:
    """One way a set is kept: files, as names or patterns, alone or in one of the archives, and their reader."""

    files: tuple[str, ...]
    load: Callable[[Files], ImageSet]
    archives: tuple[str, ...] = ()


def load_published(about: Published, layouts: Sequence[Layout], root: Path) -> ImageSet:
    """The set from the first layout that is complete, in its usual folders below `root`, in `root` or in an archive."""
    own = [root / name for name in about.folders]
    # In its own folders every layout before any in the root, where train.npz or MNIST's names may be another set's.
    found, lacks = _complete((layout, Folder(place)) for layout in layouts for place in own)
    if found is None:
        # A folder of its own that lacks files has none in the root either: those would be taken for what is missing.
        elsewhere = _complete(_outside(layouts, [root, *own], unpacked=not lacks))
        found, lacks = elsewhere[0], lacks + elsewhere[1]
    if found is not None:
        return found[0].load(found[1])
    if lacks:
        raise InputError(f"{about.title} is incomplete: {'; '.join(lacks)}; {about.again}")
    if root.is_file():
        raise InputError(f"{root}: is no archive of {about.title}; give a folder, or an archive of this very set")
    listed = ", ".join(str(place) if place.is_dir() else f"{place} (no such folder)" for place in [root, *own])
    advice = f"`elle data get {about.name}` downloads it, or put the files of {about.page} in the first"
    raise InputError(f"no {about.title} found; looked in {listed}; {advice}")


def _complete(candidates: Iterable[tuple[Layout, Files]]) -> tuple[tuple[Layout, Files] | None, list[str]]:
    """The first that has all its files, and what those before it lack that have some."""
    lacks: list[str] = []
    for layout, files in candidates:
        names = files.names()
        missing = [pattern for pattern in layout.files if not matching(names, pattern)]
        if not missing:
            return (layout, files), lacks
        if len(missing) < len(layout.files):
            lacks.append(f"{files.where} lacks {', '.join(missing)}")
    return None, lacks


def _outside(layouts: Sequence[Layout], places: Sequence[Path], unpacked: bool) -> Iterator[tuple[Layout, Files]]:
    """Each layout in the root, the first place, where `unpacked`, and in archives; the root may be one itself."""
    root = places[0]
    for layout in layouts:
        if unpacked:
            yield layout, Folder(root)
        archives = [place / name for place in places for name in layout.archives]
        if layout.archives and root.is_file():
            archives.append(root)
        yield from ((layout, open_archive(path, layout.files)) for path in archives if path.is_file())


def published_set(about: Published, train: Split, test: Split, where: Path) -> ImageSet:
    """A set from files whose names and contents do not tell which one they are of.

    Where a class is without training images they are another's: CIFAR-10's labels would do for CIFAR-100.
    """
    missing = np.flatnonzero(np.bincount(train.y, minlength=len(about.classes)) == 0)
    if len(missing):
        raise InputError(
            f"{where}: no training images of {len(missing)} classes, such as {about.classes[missing[0]]!r}, so it is "
            f"not {about.title}; give each set a folder of its own, and data=arrays for one of yours"
        )
    return ImageSet(train, test, about.classes)


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """The names that fit a pattern."""
    return [name for name in names if fnmatch(name, pattern)]


def checked_split(name: str, x: npt.NDArray[Any], y: npt.NDArray[Any], classes: int, advice: str) -> Split:
    """A split of images [N, C, H, W] and integer labels [N] that fit each other and the number of classes."""
    if len(x) != len(y):
        raise InputError(f"{name}: {len(x)} images but {len(y)} labels; {advice}")
    if len(y) == 0:
        raise InputError(f"{name}: holds no images; {advice}")
    wrong = y[(y < 0) | (y >= classes)]
    if len(wrong):
        raise InputError(f"{name}: label {wrong[0]} is outside 0..{classes - 1}; {advice}")
    # A view of a file's bytes is read-only, and torch warns about such arrays: require copies it.
    return Split(np.require(x, np.uint8, ["C", "W"]), y.astype(np.int64))


def join(parts: Sequence[Split]) -> Split:
    """All the images of several splits, in order."""
    if len(parts) == 1:
        return parts[0]
    return Split(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def apart(names: Sequence[str], ids: Sequence[object]) -> tuple[str, ...]:
    """The names of classes, with the id of each where two share a name: reports are kept by name."""
    count = Counter(names)
    return tuple(f"{name} ({id})" if count[name] > 1 else name for name, id in zip(names, ids, strict=True))


def describe(value: Any) -> str:
    """A value by its type, an array by its shape too: never its contents, which may be anything."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"
