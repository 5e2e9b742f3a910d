"""What is written down of the steps of an epoch: their means in a record, and each of them in a line of columns."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from elle.engine.step import RECORDED

Record = dict[str, Any]


def number(value: Tensor | float) -> float | None:
    """A finite number, or None, which JSON can write."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def means(rows: Tensor) -> Record:
    """The mean of each quantity over the steps that have it."""
    return {name: number(rows[:, k].nanmean()) for k, name in enumerate(RECORDED) if name != "threshold"}


def columns(epoch: int, last: int, rows: Tensor) -> Record:
    """All steps of an epoch in one line: the number of the first, and for each quantity its values, to five digits."""
    found = {name: [number(float(f"{value:.5g}")) for value in rows[:, k].tolist()] for k, name in enumerate(RECORDED)}
    known = {name: values for name, values in found.items() if any(value is not None for value in values)}
    return {"epoch": epoch, "step": last - len(rows) + 1} | known
