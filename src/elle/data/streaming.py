"""Training images too many to keep decoded: each step's batch is read from the files while the steps before run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from torch import Tensor

from elle.data.cache import ResizeCache
from elle.data.decoding import MARGIN
from elle.data.folder import REPAIR, FolderSplit
from elle.data.phases import Timetable
from elle.data.resident import epoch_order, to_unit
from elle.data.workers import Batch, Decoder, Task, made_by_workers, usable_workers
from elle.errors import InputError, WorkError

_Tensors = tuple[Tensor, Tensor, Tensor]
"""Pixels uint8 [B, S, S, 3], which of them to mirror, labels."""


class Streaming:
    """A folder's images in batches, for each step of a run; `stage` brings one to the device, `batch` returns it.

    Of each batch of the timetable rank r takes the r-th of `ranks` equal slices.
    `cache` is a folder to keep decoded images in.
    """

    def __init__(
        self,
        split: FolderSplit,
        device: torch.device | str,
        timetable: Timetable,
        *,
        seed: int,
        crop: bool = True,
        flip: bool = True,
        workers: int | None = None,
        ahead: int = 2,
        cache: Path | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self.count, self.timetable, self.seed = len(split), timetable, seed
        self.rank, self.ranks = rank, ranks
        self.workers, self.ahead = usable_workers(workers), ahead
        largest = max(phase.image_size for phase in timetable.phases)
        kept = ResizeCache(cache, split.paths, round(MARGIN * largest)) if cache is not None else None
        self.decoder = Decoder(split, seed=seed, crop=crop, flip=flip, cache=kept)
        self._batches: Generator[Batch, None, None] | None = None
        self._now: tuple[int, int] | None = None
        self._next: tuple[int, int] | None = None
        self._staged: _Tensors | None = None
        self._upload = _Upload(self.device) if self.device.type == "cuda" else None

    def __len__(self) -> int:
        return self.count

    def images(self, epoch: int) -> int:
        """This rank's part of a batch."""
        return self.timetable.batch(epoch) // self.ranks

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of this epoch, int64 [N]."""
        return torch.from_numpy(epoch_order(self.count, seed, epoch)).to(self.device)

    def tasks(self, epoch: int, step: int) -> Iterator[Task]:
        """Every batch of this rank from that step on, to the end of the last epoch."""
        for e in range(epoch, self.timetable.epochs):
            order, images = epoch_order(self.count, self.seed, e), self.images(e)
            for k in range(step if e == epoch else 0, self.timetable.steps(e)):
                first = (k * self.ranks + self.rank) * images
                yield Task(e, first, order[first : first + images], self.timetable.size(e))

    def stage(self, epoch: int, step: int) -> None:
        """Wait for the batch of that step and put it where `batch` finds it; steps in a row are made ahead."""
        if self._now == (epoch, step):
            return
        if self._batches is None or self._next != (epoch, step):
            self.close()
            epochs = range(self.timetable.epochs)
            fullest = max(epochs, key=lambda one: self.images(one) * self.timetable.size(one) ** 2)
            self._batches = made_by_workers(
                self.decoder,
                self.tasks(epoch, step),
                images=self.images(fullest),
                size=self.timetable.size(fullest),
                workers=self.workers,
                ahead=self.ahead,
            )
        try:
            batch = next(self._batches)
        except InputError as problem:
            # The input was fine when the run began, and a run goes on with as many images as it began with.
            raise WorkError(str(problem).replace(REPAIR, "replace it")) from None
        self._now = epoch, step
        self._next = (epoch, step + 1) if step + 1 < self.timetable.steps(epoch) else (epoch + 1, 0)
        self._put(tuple(torch.from_numpy(part) for part in batch))  # type: ignore[arg-type]
        if self._next == (self.timetable.epochs, 0):
            self.close()  # that was the last one: the workers' memory is free for the evaluation

    def _put(self, batch: _Tensors) -> None:
        """Into tensors that stay the same while the batch's shape does: a captured step reads them where they are."""
        if self._staged is None or self._staged[0].shape != batch[0].shape:
            self._staged = _empty_like(batch, self.device)
        if self._upload is None:
            _copy(batch, self._staged)
        else:
            self._upload(batch, self._staged)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The staged images float32 [B, 3, S, S] in [0, 1] and their labels; `index` is already part of the tasks."""
        assert self._staged is not None, "stage(epoch, step) comes first"
        x, mirrored, y = self._staged
        x = x.permute(0, 3, 1, 2)
        if self.decoder.flip:
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        return to_unit(x), y

    def close(self) -> None:
        """End the workers."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None


class _Upload:
    """Copies to the GPU beside the step that still runs: to page-locked memory, over the bus, then into place.

    Nothing waits but the host, and it only for the copy of the batch before the last.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pinned: list[_Tensors] = []
        self.arrived: _Tensors | None = None
        self.sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.turn = 0

    def __call__(self, batch: _Tensors, target: _Tensors) -> None:
        here = torch.cuda.current_stream(self.device)
        if self.arrived is None or self.arrived[0].shape != batch[0].shape:
            self.stream.synchronize()
            self.pinned = [_empty_like(batch, "cpu", pinned=True) for _ in range(2)]
            self.arrived = _empty_like(batch, self.device)
            self.stream.wait_stream(here)
        self.turn = 1 - self.turn
        pinned, sent = self.pinned[self.turn], self.sent[self.turn]
        sent.synchronize()  # the page-locked memory is free again: waits for the batch before the last, if at all
        _copy(batch, pinned)
        with torch.cuda.stream(self.stream):
            _copy(pinned, self.arrived)
            sent.record()
        here.wait_stream(self.stream)
        _copy(self.arrived, target)
        self.stream.wait_stream(here)


def _empty_like(batch: _Tensors, device: torch.device | str, pinned: bool = False) -> _Tensors:
    x, mirrored, y = (torch.empty_like(part, device=device, pin_memory=pinned) for part in batch)
    return x, mirrored, y


def _copy(source: _Tensors, target: _Tensors) -> None:
    for part, place in zip(source, target, strict=True):
        place.copy_(part, non_blocking=True)
