"""Schedules: the fraction of training done, from 0 to 1, -> a multiplier of the maximum rate. Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Schedule = Callable[[float], float]


def piecewise_linear(points: Sequence[tuple[float, float]]) -> Schedule:
    """Straight lines through (fraction, multiplier) points with increasing fractions."""

    def multiplier(fraction: float) -> float:
        for (x0, y0), (x1, y1) in pairwise(points):
            if fraction <= x1:
                return y0 + (y1 - y0) * (fraction - x0) / (x1 - x0)
        return points[-1][1]

    return multiplier


def steps_down(drops: Sequence[float], factor: float = 0.1) -> Schedule:
    """1, multiplied by `factor` at each fraction in `drops`."""
    return lambda fraction: factor ** sum(fraction >= drop for drop in drops)


SCHEDULES: dict[str, Schedule] = {
    # Short (Andriushchenko & Flammarion, 2020): up from 0 and back, the peak half-way.
    "short": piecewise_linear([(0, 0), (0.5, 1), (1, 0)]),
    # Long (Rice et al., 2020): constant, divided by 10 at one half and three quarters.
    "long": steps_down([0.5, 0.75]),
}
