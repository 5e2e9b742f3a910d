"""What `elle bench` has measured, as a figure: a step's forward and backward, as in the paper's Figure 15."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elle.charts.stacked_bars import StackedBars
from elle.errors import InputError
from elle.files import read_object


def step_figure(result: Mapping[str, Any]) -> StackedBars:
    """The bars of one result of `elle bench`."""
    rows = result["rows"]
    return StackedBars(
        f"A training step of {result['model']}, batch {result['batch']}, {result['device']}",
        "milliseconds a step",
        ("forward", "backward"),
        [row["method"] for row in rows],
        [(row["forward_ms"], row["backward_ms"]) for row in rows],
    )


def step_figures(folder: Path) -> list[StackedBars]:
    """The bars of every result that `elle bench --out` has written into this folder."""
    figures = []
    for file in sorted(folder.glob("bench-*.json")):
        try:
            figures.append(step_figure(read_object(file)))
        except (KeyError, TypeError):
            raise InputError(f"{file} is not what `elle bench --out` writes; take it out of the folder") from None
    return figures
