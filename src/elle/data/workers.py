"""Batches made by worker processes: files read, decoded, cropped and resized, ahead of whoever wants them."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from elle.data.cache import Cached, ResizeCache
from elle.data.cores import usable_cores
from elle.data.decoding import DRAWS, Box, OpenImage, Pixels, centre_box, pixel_box, random_box, resize
from elle.data.folder import FolderSplit
from elle.errors import InputError, WorkError, first_line

_BLOCK = 64
_TOGETHER = 8
"""Images decoded before they are resized: each change of work finds its code gone from the processor's caches."""


class Batch(NamedTuple):
    """Pixels uint8 [B, S, S, 3], valid until the next batch is taken; which of them to mirror; labels int64 [B]."""

    x: Pixels
    mirrored: npt.NDArray[np.bool_]
    y: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """One batch to make: which files, and the position of the first of them in the order of the epoch."""

    epoch: int
    first: int
    files: npt.NDArray[np.int64]
    size: int


class Decoder:
    """Makes the pixels of a task; what is random in them is a function of (seed, epoch, position) alone."""

    def __init__(
        self,
        split: FolderSplit,
        *,
        seed: int = 0,
        crop: bool = False,
        flip: bool = False,
        cache: ResizeCache | None = None,
    ) -> None:
        # Two arrays, not a million Python objects: reading those in a forked process would copy their memory.
        self.names = np.array([os.fsencode(path) for path in split.paths])
        self.y = split.y
        self.seed, self.crop, self.flip, self.cache = seed, crop, flip, cache

    def write(self, task: Task, into: Pixels) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Write the images of a task to `into` [B, S, S, 3]; which are to be mirrored, and the labels."""
        numbers = draws(self.seed, task.epoch, task.first, len(task.files))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
            for first in range(0, len(into), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                parts = self._parts(task, some, numbers[some, 1:])
                for part, place in zip(parts, into[some], strict=True):
                    resize(part, place)
        return numbers[:, 0] < (0.5 if self.flip else 0), self.y[task.files]

    def _parts(self, task: Task, some: slice, numbers: npt.NDArray[np.float64]) -> list[Pixels]:
        # A damaged file is found in the first epoch; later ones decode no more than they need.
        whole = task.epoch == 0
        rows = zip(task.files[some].tolist(), numbers, strict=True)
        return [self._part(number, row, task.size, whole) for number, row in rows]

    def _part(self, number: int, numbers: npt.NDArray[np.float64], size: int, whole: bool) -> Pixels:
        """The part of a file that is to be shown, before it is resized."""

        def box(width: int, height: int) -> Box:
            return random_box(numbers, width, height) if self.crop else centre_box(size, width, height)

        path = os.fsdecode(self.names[number])
        if self.cache is None:
            image = OpenImage(path)
            return image.pixels(box(image.width, image.height), size, size, whole)
        # Always by way of the square, so that a batch is the same whether the cache was full or empty.
        square, width, height = self.cache.get(number) or _squeezed(self.cache, number, path)
        side = self.cache.side
        left, top, right, bottom = pixel_box(box(width, height), (width, height), (side, side))
        return np.array(square[top:bottom, left:right])


def _squeezed(cache: ResizeCache, number: int, path: str) -> Cached:
    image = OpenImage(path)
    square = np.empty((cache.side, cache.side, 3), np.uint8)
    image.resized((0, 0, image.width, image.height), square)
    cache.put(number, square, image.width, image.height)
    return square, image.width, image.height


def draws(seed: int, epoch: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers uniform in [0, 1) for the positions first, first + 1.. of an epoch: [count, 1 + DRAWS].

    Made in blocks of positions, because to start a generator takes as long as to draw some thousand numbers.
    """
    blocks = range(first // _BLOCK, (first + count - 1) // _BLOCK + 1)
    keys = (np.random.SeedSequence(seed, spawn_key=(epoch, block)) for block in blocks)
    rows = np.concatenate([np.random.default_rng(key).random((_BLOCK, 1 + DRAWS)) for key in keys])
    return rows[first % _BLOCK :][:count]


def usable_workers(wanted: int | None) -> int:
    """The number of workers: as many as are wanted, or one for each core except the one that the training needs."""
    return wanted if wanted is not None else max(1, usable_cores() - 1)


def made_by_workers(
    decoder: Decoder, tasks: Iterable[Task], *, images: int, size: int, workers: int, ahead: int = 2
) -> Generator[Batch, None, None]:
    """The batch of each task, in their order, each worker having `ahead` of them under way; 0 workers: made here.

    No task takes more memory than `images` images of `size` pixels a side. InputError names a file that cannot be read.
    """
    count = max(1, workers) * ahead + 1  # the ones under way, and the one that was taken last
    slots = _Slots(decoder, count, images, size)
    made = _started(slots, tasks, workers, ahead)
    try:
        for result in made:
            if isinstance(result, str):
                raise InputError(result)
            slot, shape, mirrored, y = result
            yield Batch(slots.view(slot, shape), mirrored, y)
    except RuntimeError as problem:
        if not str(problem).startswith("DataLoader worker"):
            raise
        reason = first_line(problem).rstrip(".")
        raise WorkError(
            f"a process that decodes images died ({reason}); if memory was short, use fewer than workers={workers}"
        ) from None


class _Slots(Dataset[Any]):
    """Memory shared with the workers, in which they write batches: used again and again, never sent or allocated."""

    def __init__(self, decoder: Decoder, count: int, images: int, size: int) -> None:
        self.decoder, self.count, self.bytes = decoder, count, images * size * size * 3
        # Anonymous, so that a container's small /dev/shm does not matter.
        self.memory = np.frombuffer(mmap.mmap(-1, count * self.bytes), np.uint8).reshape(count, self.bytes)

    def view(self, slot: int, shape: tuple[int, ...]) -> Pixels:
        return self.memory[slot, : int(np.prod(shape))].reshape(shape)

    def __getitem__(self, numbered: tuple[int, Task]) -> Any:
        """In a worker: fill the next slot; what is wrong with a file comes back as its text."""
        number, task = numbered
        slot, shape = number % self.count, (len(task.files), task.size, task.size, 3)
        try:
            return slot, shape, *self.decoder.write(task, self.view(slot, shape))
        except InputError as problem:
            return str(problem)


def _started(slots: _Slots, tasks: Iterable[Task], workers: int, ahead: int) -> Iterator[Any]:
    """The results of the tasks, in their order, from processes that have been started."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are fewer cores than the user asks for workers
        loader = DataLoader(
            slots,
            batch_size=None,
            sampler=enumerate(tasks),
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=ahead if workers else None,
            # Forked: they start at once, and inherit the list of files and the slots instead of receiving them.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_begin_worker,
            # Its own: otherwise the loader draws a seed from the random numbers of the training.
            generator=torch.Generator(),
        )
        if threading.current_thread() is not threading.main_thread():
            return iter(loader)
        # Without the loader's handler, which raises an error anywhere in this process when a worker dies: where the
        # next batch is waited for, a death is noticed all the same.
        before = signal.getsignal(signal.SIGCHLD)
        made = iter(loader)
        signal.signal(signal.SIGCHLD, before)
        return made


def _as_it_is(made: Any) -> Any:
    return made


def _begin_worker(number: int) -> None:
    # Out of the terminal's process group: Ctrl-C is for the run, which saves and then ends its workers.
    os.setpgid(0, 0)
    # Memory is kept for the next image: new memory comes page by page, and each has to be cleared. Pillow keeps what it
    # is told to; glibc keeps twice the largest piece that was ever given back to it.
    np.empty(16 * 2**20, np.uint8)
    Image.core.set_blocks_max(2)  # type: ignore[attr-defined]
