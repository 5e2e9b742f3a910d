"""Random numbers of the whole batch, of which a rank or a micro-batch sees its own: parts draw what the whole draws.

Every rank has the same generator in the same state. Inside `part` a draw for n images is made for the images of all
ranks and micro-batches, and cut; so N ranks train on the noise, crops and triplets that one process would have drawn,
the generators stay in step, and their one state is all that a checkpoint needs. The price is that each rank draws
ranks times its numbers (docs/scaling.md). Layers that draw in other ways (dropout) repeat their draws on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LIKE = (torch.rand_like, torch.randn_like)
_SIZED = (torch.rand, torch.randn, torch.randint)


class Draws:
    """The draws of one step on rank `rank` of `ranks`, whose images are worked on in `parts` micro-batches."""

    def __init__(self, rank: int, ranks: int, parts: int = 1) -> None:
        self.rank, self.ranks, self.parts = rank, ranks, parts
        self._kept: list[Tensor] = []

    def whole(self, images: int) -> contextlib.AbstractContextManager[None]:
        """Within it, torch's draws are made for all ranks' images, and cut to this rank's."""
        return Draws(self.rank, self.ranks).part(0, images)

    @contextlib.contextmanager
    def part(self, number: int, images: int, fewest: int | None = None) -> Iterator[None]:
        """Within it, draws are for one micro-batch of `images`; the first draws for all of them.

        Where a method draws for `fewest` of them only, and that is one, a row is an image's and not the whole batch's.
        """
        if self.ranks == self.parts == 1:
            yield
            return
        with _Cut(self.rank, self.ranks, self.parts, number, images, self._kept, single=1 in (images, fewest)):
            yield


class _Cut(TorchFunctionMode):
    leaves_layers_alone = True
    """Only draws are replaced, so layers may still use kernels that torch functions do not see."""

    def __init__(
        self, rank: int, ranks: int, parts: int, number: int, images: int, kept: list[Tensor], single: bool
    ) -> None:
        super().__init__()
        self.rank, self.ranks, self.parts, self.number = rank, ranks, parts, number
        self.images, self.kept, self.position, self.single = images, kept, 0, single

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _LIKE and function not in _SIZED:
            return function(*args, **kwargs)
        shape = _shape(function, args, kwargs)
        if self.number == 0:
            self.kept.append(self._drawn(function, shape, args, kwargs))
        own = self.kept[self.position]
        self.position += 1
        if self.parts == 1:
            self.kept.clear()
            self.position = 0
        if not self._of_images(shape):
            return own.clone()
        value = own[:, self.number]
        return value[0] if len(value) == 1 else value.flatten(0, 1)

    def _of_images(self, shape: Sequence[int]) -> bool:
        """Whether the draw has a row for each image; otherwise it is one for the whole batch, the same on all ranks."""
        return len(shape) > 0 and (shape[0] > 1 or self.single)

    def _drawn(self, function: Any, shape: Sequence[int], args: Any, kwargs: Any) -> Tensor:
        """This rank's rows, [blocks, parts, images, ...], of a draw for all ranks."""
        if not self._of_images(shape):
            value: Tensor = function(*args, **kwargs)
            return value
        # Several points an image come as blocks of all images; a share of the images as one shorter block.
        blocks = shape[0] // self.images if shape[0] % self.images == 0 else 1
        whole = [shape[0] * self.ranks * self.parts, *shape[1:]]
        drawn = _resized(function, whole, args, kwargs)
        rows = shape[0] // blocks
        own = drawn.view(blocks, self.ranks, self.parts, rows, *shape[1:])[:, self.rank]
        return own.clone() if self.parts > 1 else own  # a copy lets go of the other ranks' rows


def _shape(function: Any, args: Any, kwargs: Any) -> Sequence[int]:
    if function in _LIKE:
        shape: Sequence[int] = args[0].shape
        return shape
    if "size" in kwargs:
        return list(kwargs["size"])
    sequences = [value for value in args if isinstance(value, (tuple, list))]
    return list(sequences[0]) if sequences else [int(value) for value in args]


def _resized(function: Any, size: list[int], args: Any, kwargs: Any) -> Tensor:
    """The same draw in another size; it keeps the memory format, on which the numbers in its rows depend."""
    if function in _LIKE:
        x = args[0]
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        layout = torch.channels_last if last else torch.contiguous_format
        drawn: Tensor = function(torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout), **kwargs)
        return drawn
    rest = {key: value for key, value in kwargs.items() if key != "size"}
    # randint's bounds come before the size; the sizes of rand and randn may be separate numbers.
    bounds = [value for value in args if isinstance(value, int)] if function is torch.randint else []
    sized: Tensor = function(*bounds, size, **rest)
    return sized
