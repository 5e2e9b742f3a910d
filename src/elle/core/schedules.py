"""Schedules: the fraction of training done, from 0 to 1, -> multipliers of the highest rate and of eps. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Multiplier = Callable[[float], float]
"""fraction of training done -> a factor from 0 to 1"""


def piecewise_linear(points: Sequence[tuple[float, float]]) -> Multiplier:
    """Straight lines through (fraction, multiplier) points with increasing fractions."""

    def multiplier(fraction: float) -> float:
        for (x0, y0), (x1, y1) in pairwise(points):
            if fraction <= x1:
                return y0 + (y1 - y0) * (fraction - x0) / (x1 - x0)
        return points[-1][1]

    return multiplier


def steps_down(drops: Sequence[float]) -> Multiplier:
    """1, divided by 10 at each fraction in `drops`."""
    return lambda fraction: 0.1 ** sum(fraction >= drop for drop in drops)


def warm_cosine(peak: float, start: float) -> Multiplier:
    """Half a cosine from `start` up to 1 at the fraction `peak`, and half a cosine down to 0."""

    def multiplier(fraction: float) -> float:
        if fraction < peak:
            return start + (1 - start) * (1 - math.cos(math.pi * fraction / peak)) / 2
        return (1 + math.cos(math.pi * (fraction - peak) / (1 - peak))) / 2

    return multiplier


def constant(fraction: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Schedule:
    """The course of the rate and of eps, and the length, highest rate and batch it was published with."""

    rate: Multiplier
    epochs: int
    lr: float
    batch: int = 128
    eps: Multiplier = constant


def _grown(epochs: int, of: int) -> Multiplier:
    """From 0 to 1 over the first `epochs` of so many; the paper's code takes one step an epoch instead."""
    return piecewise_linear([(0, 0), (epochs / of, 1)])


# The cosine's rise of 2.5 % from a twenty-fifth is the published code's; the paper says "cosine".
_COSINE = warm_cosine(peak=0.025, start=0.04)
_DROPS = steps_down([0.5, 0.75])
SCHEDULES: dict[str, Schedule] = {
    # Short (Andriushchenko & Flammarion, 2020): up from 0 and back, the peak half-way, on SVHN at two fifths.
    "short": Schedule(piecewise_linear([(0, 0), (0.5, 1), (1, 0)]), epochs=30, lr=0.2),
    "short-svhn": Schedule(piecewise_linear([(0, 0), (0.4, 1), (1, 0)]), epochs=15, lr=0.05, eps=_grown(5, of=15)),
    # Long (Rice et al., 2020): constant, divided by 10 at one half and three quarters.
    "long": Schedule(_DROPS, epochs=200, lr=0.1),
    "long-svhn": Schedule(_DROPS, epochs=200, lr=0.01, eps=_grown(5, of=200)),
    # Long-cos (Xu et al., 2023), and the paper's thousand epochs (Appendix B.6).
    "long-cos": Schedule(_COSINE, epochs=200, lr=0.1, batch=256),
    "cos-1000": Schedule(_COSINE, epochs=1000, lr=0.02, batch=256),
    # Wong et al. (2020): 0 -> 0.4 -> 0.04 -> 0.004 -> 0.0004 at epochs 0, 1, 6, 12, 15.
    "imagenet-15": Schedule(
        piecewise_linear([(0, 0), (1 / 15, 1), (6 / 15, 0.1), (12 / 15, 0.01), (1, 0.001)]),
        epochs=15,
        lr=0.4,
        batch=512,
    ),
}
