"""Heat maps as inline SVG, with the standard library only: a loss over two directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elle.charts.axis import linear_axis
from elle.charts.svg import WIDTH, escape, picture, text_at

# Dark to bright, evenly for the eye and for colour-blind readers.
STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
NO_NUMBER = "#b0b0b0"
"""Grey, which no loss has."""
LEFT, RIGHT, TOP, HEIGHT = 56.0, 356.0, 30.0, 240.0


@dataclass(frozen=True)
class Heatmap:
    """values[i][j] at y[i] and x[j]; `low` and `high` fix the colours, so that two maps can be compared."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[float]]
    low: float
    high: float
    note: str = ""


def draw_heatmap(heatmap: Heatmap) -> str:
    """The map as an `<svg>`, with a scale of its colours beside it."""
    width, height = (RIGHT - LEFT) / len(heatmap.x), HEIGHT / len(heatmap.y)
    cells = []
    for i, row in enumerate(heatmap.values):
        for j, value in enumerate(row):
            place = f'x="{LEFT + j * width:.1f}" y="{TOP + HEIGHT - (i + 1) * height:.1f}"'
            size = f'width="{width + 0.4:.1f}" height="{height + 0.4:.1f}"'
            told = f"{heatmap.x_label} {heatmap.x[j]:.3g}, {heatmap.y_label} {heatmap.y[i]:.3g}: {value:.3g}"
            cells.append(f'<rect {place} {size} fill="{_colour(heatmap, value)}"><title>{escape(told)}</title></rect>')
    texts = [
        _text(0, 14, heatmap.y_label),
        _text((LEFT + RIGHT) / 2, TOP + HEIGHT + 38, heatmap.x_label, "middle"),
    ]
    for k, value in ((0, heatmap.x[0]), (len(heatmap.x) - 1, heatmap.x[-1])):
        texts.append(_text(LEFT + (k + 0.5) * width, TOP + HEIGHT + 18, f"{value:.3g}", "middle"))
    for k, value in ((0, heatmap.y[0]), (len(heatmap.y) - 1, heatmap.y[-1])):
        texts.append(_text(LEFT - 7, TOP + HEIGHT - (k + 0.5) * height + 4, f"{value:.3g}", "end"))
    highest = max((value for row in heatmap.values for value in row if math.isfinite(value)), default=math.nan)
    body = [*cells, *_scale(heatmap), *texts]
    return picture(heatmap.title, f"highest {highest:.3g}", TOP + HEIGHT + 48, body)


def _scale(heatmap: Heatmap) -> list[str]:
    axis = linear_axis([heatmap.low, heatmap.high], tight=True)
    span = heatmap.high - heatmap.low
    # A power of ten beside the word: below it, it would be written over the highest number of the scale.
    parts = [_text(WIDTH, 14, axis.titled("loss"), "end") if axis.factor else _text(RIGHT + 16, 14, "loss")]
    for k in range(40):
        value = heatmap.low + (k + 0.5) / 40 * span
        y = TOP + HEIGHT * (1 - (k + 1) / 40)
        parts.append(
            f'<rect x="{RIGHT + 16:.1f}" y="{y:.1f}" width="12" height="6.4" fill="{_colour(heatmap, value)}"/>'
        )
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        at = (tick - heatmap.low) / span if span else tick - heatmap.low  # all alike: the one tick that is that value
        if 0 <= at <= (1 if span else 0):
            parts.append(_text(RIGHT + 34, TOP + HEIGHT * (1 - at) + 4, label))
    return parts


def _colour(heatmap: Heatmap, value: float) -> str:
    if not math.isfinite(value):
        return NO_NUMBER
    span = heatmap.high - heatmap.low
    share = (value - heatmap.low) / span if span > 0 else 0.0
    place = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    k = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (place - k)) for a, b in zip(STOPS[k], STOPS[k + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return text_at(x, y, text, anchor, "soft")
