"""How far apart images of different classes are: the smallest l-infinity distance, exactly.

Half of it is the largest radius at which a classifier could still be right everywhere (Yang et al., arXiv 2003.02460).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elle.data.sources import ImageSet, Split

_PIXELS = 48
"""Pixels that are looked up before two images are compared as a whole."""
_BLOCK = 2**16
"""Images in one table of bits: 96 MiB at 48 pixels."""
_FIRST_LIMIT, _GROWTH = 16, 1.25

Words = npt.NDArray[np.uint64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Closest:
    """The distance in grey levels, and the two images as (number in the first split, number in the second)."""

    distance: int
    images: tuple[int, int]


def separation(images: ImageSet) -> dict[str, Closest | None]:
    """The closest images of different classes within the training split, and between test and training split."""
    return {
        "train-train": closest(images.train, images.train),
        "test-train": closest(images.test, images.train),
    }


def closest(first: Split, second: Split) -> Closest | None:
    """The closest images of different classes, one from each split (which may be the same); None for one class.

    Pairs nearer than a limit are sought, with the limit raised until there is one: the nearest of them is the
    nearest of all, and none nearer than the last limit is left to look for.
    """
    if not set(first.y.tolist()) - {int(second.y[0])} and not set(second.y.tolist()) - {int(first.y[0])}:
        return None
    floor, limit = 0, _FIRST_LIMIT
    while True:
        found = _Search(first, second, floor, limit).run()
        if found is not None:
            return found
        floor, limit = limit, min(256, int(limit * _GROWTH))


class _Search:
    """The closest pair nearer than `limit`, where none is nearer than `floor`."""

    def __init__(self, first: Split, second: Split, floor: int, limit: int) -> None:
        self.x, self.others = (split.x.reshape(len(split), -1) for split in (first, second))
        self.y, self.other_y = first.y, second.y
        self.within_one = first is second
        self.floor, self.limit = floor, limit
        self.best: Closest | None = None
        self.waiting: list[tuple[int, npt.NDArray[np.int64]]] = []

    def run(self) -> Closest | None:
        pixels = self._telling_pixels()
        for start in range(0, len(self.others), _BLOCK):
            near, other_class = self._tables(pixels, start)
            last = min(len(self.x), start + _BLOCK) if self.within_one else len(self.x)
            for i in range(last):
                self._look_up(i, start, pixels, near, other_class)
                if self.best is not None and self.best.distance == self.floor:
                    return self.best
            self._compare()
        return self.best

    def _telling_pixels(self) -> npt.NDArray[np.int64]:
        """Pixels that together tell most pairs of a sample apart, chosen one after the other."""
        draw = np.random.default_rng(0)
        a, b = draw.integers(len(self.x), size=8192), draw.integers(len(self.others), size=8192)
        pool = draw.permutation(self.x.shape[1])[:512]
        apart = _difference(self.x[a][:, pool], self.others[b][:, pool]) >= self.limit
        chosen: list[int] = []
        while apart.any() and len(chosen) < _PIXELS:
            chosen.append(int(apart.sum(0).argmax()))
            apart = apart[~apart[:, chosen[-1]]]
        rest = [number for number in range(len(pool)) if number not in set(chosen)]
        return pool[(chosen + rest)[:_PIXELS]]

    def _tables(self, pixels: npt.NDArray[np.int64], start: int) -> tuple[Words, Words]:
        """Bit j of near[k, v] says that pixel k of image start + j is nearer than the limit to the value v."""
        values = self.others[start : start + _BLOCK, pixels]
        levels = np.arange(256, dtype=np.uint8)[:, None]
        near = np.empty((len(pixels), 256, -(-len(values) // 64)), np.uint64)
        for k, column in enumerate(values.T):
            up_to = _bits(column <= levels)
            near[k] = up_to[np.minimum(np.arange(256) + self.limit - 1, 255)]
            near[k, self.limit :] &= ~up_to[: 256 - self.limit]
        classes = np.arange(max(self.y.max(), self.other_y.max()) + 1)[:, None]
        return near, _bits(self.other_y[start : start + _BLOCK] != classes)

    def _look_up(self, i: int, start: int, pixels: npt.NDArray[np.int64], near: Words, other_class: Words) -> None:
        skip = max(0, i - start) // 64 if self.within_one else 0  # each pair once
        rows = near[np.arange(len(pixels)), self.x[i, pixels], skip:]
        bits = np.bitwise_and.reduce(rows, axis=0) & other_class[self.y[i], skip:]
        if not bits.any():
            return
        found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")) + start + 64 * skip
        self.waiting.append((i, found))
        if sum(len(numbers) for _, numbers in self.waiting) > 4096:
            self._compare()

    def _compare(self) -> None:
        """The pairs that no looked-up pixel tells apart, first by some more of their pixels and then by all."""
        if not self.waiting:
            return
        a = np.repeat([i for i, _ in self.waiting], [len(numbers) for _, numbers in self.waiting])
        b = np.concatenate([numbers for _, numbers in self.waiting])
        self.waiting = []
        for part in range(0, len(a), 4096):
            self._compare_some(a[part : part + 4096], b[part : part + 4096])

    def _compare_some(self, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> None:
        for step in (16, 1):
            distances = _difference(self.x[a, ::step], self.others[b, ::step]).max(axis=1)
            nearer = distances < (self.best.distance if self.best else self.limit)
            a, b, distances = a[nearer], b[nearer], distances[nearer]
        if len(distances):
            place = int(distances.argmin())
            self.best = Closest(int(distances[place]), (int(a[place]), int(b[place])))


def _difference(a: Pixels, b: Pixels) -> Pixels:
    return np.maximum(a, b) - np.minimum(a, b)


def _bits(rows: npt.NDArray[np.bool_]) -> Words:
    """Rows of booleans as rows of 64-bit words, the first boolean in the lowest bit."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    padded = np.zeros((len(rows), -(-packed.shape[1] // 8) * 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)
