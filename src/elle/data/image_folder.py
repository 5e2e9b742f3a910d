"""A folder of image files as an image set: test images decoded once, training images kept decoded or streamed."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from elle.data.folder import FolderIndex, FolderSplit, index_folder
from elle.data.phases import Phase, Timetable
from elle.data.sources import ImageSet, Split, spread_images
from elle.errors import InputError, WorkError, expanded

if TYPE_CHECKING:
    import torch

    from elle.data.resident import TrainingImages

Loading = Literal["auto", "resident", "streaming"]

IMAGE_SIZE = 224
RESIDENT_BYTES = 2 * 2**30
"""A training set that takes no more than this once decoded is kept on the device; a larger one is streamed."""
_IN_MEMORY_BYTES = 2 * 2**30
_LOOKED_AT = 200
_MEASURED = 2048
_HELD_OUT_SHARE = 0.1
_VALIDATION = 1024
_CHUNK = 64
_LARGE = 96
"""Pixels a side from which a network that halves its images twice at once is the better one."""
_STEPS = 3000
"""Optimisation steps that a small set is trained for, at least, in up to 100 epochs."""


class FolderImages(Split):
    """Image files, all shown as size x size pixels: the short side resized, the middle cut out; decoded when needed."""

    def __init__(self, files: FolderSplit, size: int, workers: int | None) -> None:
        for name, value in {"files": files, "size": size, "workers": workers, "y": files.y}.items():
            object.__setattr__(self, name, value)

    files: FolderSplit
    size: int
    workers: int | None

    @cached_property
    def x(self) -> npt.NDArray[np.uint8]:
        """Every image, uint8 [N, 3, size, size]; in a temporary file, which leaves with the process, where large."""
        from elle.data.workers import Decoder, Task, made_by_workers, usable_workers

        count, size = len(self.files), self.size
        x = _empty((count, 3, size, size))
        tasks = [Task(0, k, np.arange(k, min(k + _CHUNK, count)), size) for k in range(0, count, _CHUNK)]
        workers = min(usable_workers(self.workers), max(0, len(tasks) - 1))
        made = made_by_workers(Decoder(self.files), tasks, images=_CHUNK, size=size, workers=workers)
        for task, batch in zip(tasks, made, strict=True):
            x[task.files] = batch.x.transpose(0, 3, 1, 2)
        return x

    def first(self, count: int) -> FolderImages:
        return self.part(np.arange(count))

    def part(self, numbers: npt.NDArray[np.int64]) -> FolderImages:
        return FolderImages(self.files.part(numbers), self.size, self.workers)


def folder_set(root: Path, image_size: int | None, workers: int | None) -> ImageSet:
    """The images below root/train and root/val or root/test; without those, a tenth of each class is the test.

    Without `image_size` it is IMAGE_SIZE, or the size of the largest of some images where all are smaller.
    """
    index = index_folder(root)
    train = index.train
    if len(index.classes) < 2:
        raise InputError(f"{root}: only the class {index.classes[0]!r}; a classifier needs two class folders or more")
    size = image_size or min(IMAGE_SIZE, max(_short_sides(train)))
    train, test = train_and_test(index)
    if not len(train) or not len(test):
        raise InputError(f"{root}: one image cannot be both trained on and tested on; add images, or a folder val/")
    trained, tested = FolderImages(train, size, workers), FolderImages(test, size, workers)
    return ImageSet(trained, tested, index.classes, index.skipped(), held_out=index.test is None)


def train_and_test(index: FolderIndex) -> tuple[FolderSplit, FolderSplit]:
    """The files that are trained on and those that are tested on, which nobody may have split."""
    if index.test is not None:
        return index.train, index.test
    held_out = _held_out(index.train.y)
    kept, tested = (index.train.part(chosen.nonzero()[0]) for chosen in (~held_out, held_out))
    return kept, tested


def _held_out(y: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which images are the test: a tenth of each class, one at least where it has two."""
    # RandomState, because NumPy promises that its stream never changes: the split is the same everywhere.
    order = np.random.RandomState(0).permutation(len(y))
    chosen = np.zeros(len(y), np.bool_)
    for label in np.unique(y):
        mine = order[y[order] == label]
        chosen[mine[: max(int(len(mine) > 1), round(_HELD_OUT_SHARE * len(mine)))]] = True
    return chosen


def imagenet(root: Path, image_size: int | None, workers: int | None) -> ImageSet:
    """ImageNet, or some of its classes, as train/nXXXXXXXX/*.JPEG and val/nXXXXXXXX/*.JPEG in root."""
    return folder_set(root, image_size or IMAGE_SIZE, workers)


def enough_images(data: Split) -> npt.NDArray[np.uint8]:
    """Images to compute statistics from: all of them, or some, spread over the set, where there are too many."""
    if isinstance(data, FolderImages) and _streamed(data, "auto"):
        return spread_images(data, _MEASURED).x
    return data.x


def _short_sides(split: FolderSplit) -> list[int]:
    """The lengths in pixels of the short sides of some images, spread over the set."""
    from elle.data.decoding import OpenImage

    images = (OpenImage(str(path)) for path in split.paths[:: max(1, len(split) // _LOOKED_AT)])
    return [min(image.width, image.height) for image in images]


def _empty(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    count = int(np.prod(shape))
    if count <= _IN_MEMORY_BYTES:
        return np.empty(shape, np.uint8)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the array)
    try:
        os.posix_fallocate(file.fileno(), 0, count)  # now, because a memory map of a full disk ends in a signal
    except OSError as problem:
        raise WorkError(
            f"{tempfile.gettempdir()} has no room for {count / 2**30:.1f} GiB of test images "
            f"({problem.strerror}); set TMPDIR to a larger disk"
        ) from None
    return np.memmap(file, np.uint8, "r+", shape=shape)


def filled_in(images: ImageSet, values: dict[str, Any]) -> dict[str, Any]:
    """The configuration's open values that only a folder's files can tell: how many they are, and how large."""
    data = images.train
    if not isinstance(data, FolderImages):
        return {}
    found: dict[str, Any] = {"image_size": data.size, "validation": min(_VALIDATION, len(data) // 10)}
    # Padding in the proportion of CIFAR-10's, 4 of 32 pixels.
    found |= {"crop": data.size // 8, "model": "resnet18" if data.size >= _LARGE else "preact-resnet18"}
    known = found | {key: value for key, value in values.items() if value is not None}
    count = max(1, len(data) - known["validation"])
    batch = known.get("batch") or _batch_for(count)
    epochs = min(max(30, math.ceil(_STEPS / max(1, count // batch))), 100)
    found |= {"batch": batch, "epochs": epochs, "lr": 0.1 * batch / 128}
    return {key: value for key, value in found.items() if values[key] is None}


def _batch_for(images: int) -> int:
    """64, or less where that leaves few steps an epoch, but 8 at the least: BatchNorm measures on them."""
    batch = 64
    while batch > 8 and images // batch < 16:
        batch //= 2
    return batch


def described(images: ImageSet, validation: int) -> list[str]:
    """Lines for the user about a folder: its contents, and the files in it that are not read; none for other sets."""
    if not isinstance(images.train, FolderImages):
        return []
    names = ", ".join(images.classes[:8]) + (", .." if len(images.classes) > 8 else "")
    counts = f"{len(images.train) - validation} training, {validation} validation and {len(images.test)} test images"
    size = images.train.size
    found = f"{len(images.classes)} classes ({names}): {counts}, {size} x {size} pixels"
    return [found] if images.skipped is None else [found, images.skipped]


def training_source(
    data: Split,
    device: torch.device,
    *,
    validation: int,
    seed: int,
    batch: int,
    epochs: int,
    phases: Sequence[Phase] | None = None,
    crop: int,
    flip: bool,
    loading: Loading = "auto",
    workers: int | None = None,
    cache: str | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[TrainingImages, Split]:
    """The training images, on the device or streamed to it, and the images held out for validation.

    `crop` are pixels of padding for resident images; streamed ones are cropped to a random part unless it is 0.
    `phases` replace `batch`, `epochs` and the image size.
    Streamed are the images of this rank: its part of each batch.
    """
    from elle.data.resident import Resident, ResidentInPhases, chosen_for_validation, split_validation
    from elle.data.streaming import Streaming

    _check_loading(data, bool(phases), loading, cache)
    if not isinstance(data, FolderImages) or not (phases or _streamed(data, loading)):
        training, held_out = split_validation(data, validation, seed)
        if phases:
            return ResidentInPhases(training, device, Timetable(tuple(phases), len(training)), crop, flip), held_out
        return Resident(training, device, crop, flip), held_out
    kept, held = chosen_for_validation(len(data), validation, seed)
    files, held_files = data.part(kept), data.part(held)
    timetable = Timetable(tuple(phases or [Phase(epochs, data.size, batch)]), len(files))
    source = Streaming(
        files.files,
        device,
        timetable,
        seed=seed,
        crop=crop > 0,
        flip=flip,
        workers=workers,
        cache=None if cache is None else expanded(cache),
        rank=rank,
        ranks=ranks,
    )
    return source, held_files


def _check_loading(data: Split, phases: bool, loading: Loading, cache: str | None) -> None:
    """Refuse settings that these images cannot be loaded by."""
    if phases and loading == "resident" and isinstance(data, FolderImages):
        raise InputError("phases read image files anew at each size; leave loading=resident out")
    if loading == "streaming" and not isinstance(data, FolderImages):
        raise InputError("loading=streaming is for image files, and these images are arrays; leave it out")
    if cache is not None and (loading == "resident" or not isinstance(data, FolderImages)):
        raise InputError(
            f"cache={cache} is for image files that are streamed, and these are kept decoded; leave it out"
        )


def _streamed(data: FolderImages, loading: Loading) -> bool:
    return loading == "streaming" or (loading == "auto" and 3 * len(data) * data.size**2 > RESIDENT_BYTES)
