"""How long a kernel takes, without the time of its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from elle.engine.bench import milliseconds
from elle.engine.runtime import GraphedStep

REPEATS = 20


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Microseconds of `work`, repeated within a CUDA graph."""

    def repeated(index: Tensor | None = None) -> None:
        for _ in range(1 if index is None else REPEATS):
            work()

    if device.type == "cpu":  # only to try a program
        return 1000 * milliseconds(repeated, 1, 1, device)
    graphed = GraphedStep(repeated, 1, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(GraphedStep.WARM_UP + 1):
        graphed(index)
    return 1000 * milliseconds(lambda: graphed(index), rounds=5, repeats=2, device=device) / REPEATS
