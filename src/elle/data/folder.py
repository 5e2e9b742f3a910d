"""Folders of images: which files there are, of which class, and each as an RGB array, whatever the file holds."""

import io
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.files import names_in
from elle.data.sources import apart
from elle.errors import InputError, first_line

FORMATS = ("JPEG", "PNG", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_OTHERS = (".gif", ".tif", ".tiff", ".bmp", ".heic", ".heif", ".avif", ".jfif", ".jpe", ".jp2", ".ppm", ".pgm", ".tga")
"""Endings of images that are not read: whoever has them among the others must hear of it."""
REPAIR = "replace or remove it"
MAX_PIXELS = 2**26
"""Of one image: above ImageNet's largest, below the size at which Pillow suspects a decompression bomb."""
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}
"""What the folders of splits are called, here and elsewhere, in any case."""
_LAYOUT = "the layout is CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg (or test/; .jpeg, .png, .webp)"


@dataclass
class FolderSplit:
    """Image files and their labels y int64 [N]."""

    paths: list[Path]
    y: npt.NDArray[np.int64]
    skipped: Counter[str] = field(default_factory=Counter)
    """Images beside them in other formats, which are not read, by their endings."""

    def __len__(self) -> int:
        return len(self.paths)

    def part(self, numbers: npt.NDArray[np.int64]) -> "FolderSplit":
        return FolderSplit([self.paths[k] for k in numbers], self.y[numbers])


@dataclass
class FolderIndex:
    """The files of a training and a test split, and the names of the classes."""

    train: FolderSplit
    test: FolderSplit | None
    classes: tuple[str, ...]
    unread: tuple[str, ...] = ()
    """Folders of classes beside train/ that are no test split here, whatever they are elsewhere."""

    def skipped(self) -> str | None:
        """What is not read, in a line each: other folders of the classes, images of other formats; None: nothing."""
        lines = []
        if self.unread:
            lines.append(f"left out: {_listed(self.unread)}, as test images are read from test/, or else from val/")
        if found := self.train.skipped + (self.test.skipped if self.test else Counter()):
            counts = ", ".join(f"{count} {ending}" for ending, count in sorted(found.items()))
            lines.append(
                f"left out, as only JPEG, PNG and WebP files are read: {counts}; convert them to have them used"
            )
        return "\n".join(lines) or None


def index_folder(root: Path) -> FolderIndex:
    """The files under `root`, in the layout of ImageNet or of Tiny-ImageNet; the order is that of the sorted names.

    The test split is test/ where it has class folders, otherwise val/, by class folders or val_annotations.txt;
    None where neither is there. Class folders in `root` itself are the training split.
    """
    train, below = root / "train", set(_class_folders(root))
    if below and not below & {"train", "val", "test"}:
        train = root  # classes and nothing else: nobody has split them
        if {name.casefold() for name in below} <= _SPLITS:
            raise InputError(f"{root}: {_listed(sorted(below))} look like splits, not classes; {_LAYOUT}")
    folders = _class_folders(train)
    if not folders:
        place = train if train.is_dir() or below else root
        raise InputError(f"{place}: {'no class folders in it' if place.is_dir() else 'no such folder'}; {_LAYOUT}")
    training, test = _by_class(train, folders), None
    beside = [] if train == root else sorted(name for name in below - {"train"} if name.casefold() in _SPLITS)
    classed = [name for name in beside if set(_class_folders(root / name)) & set(folders)]
    used = "test" if "test" in classed else "val"
    if used == "test":
        test = _by_class(root / "test", folders)
    elif (root / "val" / "val_annotations.txt").is_file():
        test = _by_annotations(root / "val", folders)
    elif (root / "val").is_dir():
        test = _by_class(root / "val", folders)
    unread = tuple(name for name in classed if name != used)
    return FolderIndex(training, test, _class_names(root, folders), unread)


def _class_folders(split: Path) -> list[str]:
    return names_in(split, lambda entry: entry.is_dir() and not entry.name.startswith("."))


def _by_class(split: Path, classes: list[str]) -> FolderSplit:
    """split/CLASS/*, also split/CLASS/images/* and deeper."""
    there = _class_folders(split)
    if unknown := sorted(set(there) - set(classes)):
        raise InputError(f"{split}: {_listed(unknown)} is no class of train/; rename or remove it")
    if missing := sorted(set(classes) - set(there)):
        raise InputError(f"{split}: no folder for the class {_listed(missing)}; {_LAYOUT}")
    skipped: Counter[str] = Counter()
    files = [_images_below(split / name, skipped) for name in classes]
    if empty := [name for name, found in zip(classes, files, strict=True) if not found]:
        raise InputError(
            f"{split}: no JPEG, PNG or WebP file in the class folder {_listed(empty)}; add some, or remove the class; "
            f"{_LAYOUT}"
        )
    y = np.repeat(np.arange(len(classes), dtype=np.int64), [len(found) for found in files])
    return FolderSplit([path for found in files for path in found], y, skipped)


def _images_below(folder: Path, skipped: Counter[str]) -> list[Path]:
    """The image files in a folder and below, sorted; those of other formats are counted in `skipped`."""

    def refuse(problem: OSError) -> None:
        raise InputError(f"{problem.filename}: cannot be listed ({problem.strerror}); check its permissions")

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        # A leading dot: what macOS leaves beside a file it copies (._photo.jpg) is no image, and what other programs
        # keep in .thumbnails or .ipynb_checkpoints are copies, of which some would be tested on.
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(Path(place, name))]
        seen = [name for name in names if not name.startswith(".")]
        found += [Path(place, name) for name in seen if name.lower().endswith(SUFFIXES)]
        skipped.update(Path(name).suffix.lower() for name in seen if name.lower().endswith(_OTHERS))
    return sorted(found)


def _leads_back(folder: Path) -> bool:
    """Whether it is a link to a folder that it is in, which would never end."""
    return folder.is_symlink() and any(map(folder.samefile, folder.absolute().parents))


def _by_annotations(split: Path, classes: list[str]) -> FolderSplit:
    """Tiny-ImageNet: images/* and lines `FILE <tab> CLASS <tab> box` in val_annotations.txt."""
    notes = split / "val_annotations.txt"
    labels = {name: label for label, name in enumerate(classes)}
    skipped: Counter[str] = Counter()
    files = {path.name: path for path in _images_below(split, skipped)}
    paths, y = [], []
    for number, line in enumerate(_lines(notes), 1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if name not in files:
            raise InputError(f"{notes}: line {number} names {name[:80]!r}, which is not in {split}; get the set again")
        if label not in labels:
            raise InputError(
                f"{notes}: line {number} has the class {label[:80]!r}, unknown in train/; get the set again"
            )
        paths.append(files.pop(name))
        y.append(labels[label])
    if files:
        raise InputError(f"{notes}: no class for {_listed(sorted(files))}; get the set again")
    if not paths:
        raise InputError(f"{notes}: no lines `FILE <tab> CLASS`; get the set again")
    return FolderSplit(paths, np.array(y, np.int64), skipped)


def _class_names(root: Path, folders: list[str]) -> tuple[str, ...]:
    """The first name words.txt gives a WordNet id, with the id where two classes share it; else the folder's name."""
    if not (root / "words.txt").is_file():
        return tuple(folders)
    words = dict(line.split("\t", 1) for line in _lines(root / "words.txt") if "\t" in line)
    names = [words.get(folder, folder).split(",")[0].strip() for folder in folders]
    return apart(names, folders)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror}); check the file") from None


def _listed(names: Iterable[str]) -> str:
    few = list(names)
    return ", ".join(map(repr, few[:5])) + (f" and {len(few) - 5} more" if len(few) > 5 else "")


def decode(source: Path | bytes, name: str) -> npt.NDArray[np.uint8]:
    """The image as RGB uint8 [H, W, 3]; grey, palette and CMYK are converted, alpha is dropped, as ImageNet's users do.

    `name` is what an error calls the image.
    """
    from PIL import Image, UnidentifiedImageError  # here, because only image files need it

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(
                    f"{name}: {width} x {height} pixels, more than the {MAX_PIXELS} allowed; make it smaller"
                )
            return _rgb(image)
    except InputError:
        raise
    except UnidentifiedImageError:
        reason = "is no JPEG, PNG or WebP image"
    except OSError as problem:
        reason = f"cannot be read ({problem.strerror or first_line(problem)})"
    except Exception as problem:  # a damaged image can fail in any way at all
        reason = f"cannot be decoded ({type(problem).__name__})"
    raise InputError(f"{name}: {reason}; {REPAIR}")


def _rgb(image: Any) -> npt.NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow clips at 255 when it converts
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))
