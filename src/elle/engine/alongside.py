"""Small work beside what a step has to wait for, on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from elle.models.weight_gradients import side_stream


class Alongside:
    """Launches small work on a side stream within one step; on a CPU the work is simply done where it is called."""

    def __init__(self, device: torch.device) -> None:
        self.side = side_stream(device) if device.type == "cuda" else None
        self.read: list[tuple[Tensor, ...]] = []

    @contextlib.contextmanager
    def work(self, *read: Tensor) -> Iterator[None]:
        """Run the block on the side stream: it may read `read` and all older tensors; use its results after `join`."""
        if self.side is None:
            yield
            return
        # Else their memory would be given away once the current stream has no use for it.
        self.read.append(read)
        # Also for what it writes: the memory may be one that the current stream has just been using.
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def join(self) -> None:
        """Make the current stream wait for the side stream; a CUDA graph is incomplete without this."""
        if self.side is not None and self.read:
            torch.cuda.current_stream().wait_stream(self.side)
        self.read.clear()
