"""Horizontal bars as inline SVG: one quantity of several things, with its std."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elle.charts.axis import linear_axis
from elle.charts.svg import COLOURS, GLYPH, INKS, WIDTH, picture, rule, short, text_at

_ROW, _BAR = 30.0, 17.0
_MAX_NAME = 30


@dataclass(frozen=True)
class Bar:
    """A named length; `std` is drawn as a whisker."""

    name: str
    value: float
    std: float | None = None


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    note: str = ""


def draw_bars(bars: Bars, names: Sequence[str] = ()) -> str:
    """The bars as an `<svg>`; `names` fixes which name has which colour, as on the page's charts."""
    order = list(dict.fromkeys([*names, *(bar.name for bar in bars.bars)]))
    left = min(_MAX_NAME, max((len(bar.name) for bar in bars.bars), default=1)) * GLYPH + 10
    right = WIDTH - 8 * GLYPH
    axis = linear_axis([0.0, *(bar.value + (bar.std or 0) for bar in bars.bars)])
    bottom = 8 + _ROW * len(bars.bars)

    def x(value: float) -> float:
        return left + (right - left) * axis.place(value)

    body = []
    room = (right - left) / max(1, len(axis.ticks) - 1)
    stride = math.ceil((max(map(len, axis.labels)) + 1) * GLYPH / room)  # long names leave little
    for number, (tick, label) in enumerate(zip(axis.ticks, axis.labels, strict=True)):
        body.append(rule("grid", f"M{x(tick):.1f} 4V{bottom:.1f}"))
        if number % stride == 0:
            body.append(text_at(x(tick), bottom + 18, label, "middle", "soft"))
    for row, bar in enumerate(bars.bars):
        top = 8 + _ROW * row + (_ROW - _BAR) / 2
        colour = order.index(bar.name) % len(COLOURS)
        body.append(
            f'<rect class="dot c{colour}" fill="{COLOURS[colour][0]}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{x(bar.value) - left:.1f}" height="{_BAR}"/>'
        )
        end = x(bar.value)
        if bar.std:
            low, end, middle = x(max(0.0, bar.value - bar.std)), x(bar.value + bar.std), top + _BAR / 2
            path = f"M{low:.1f} {middle:.1f}H{end:.1f}M{low:.1f} {middle - 4:.1f}v8M{end:.1f} {middle - 4:.1f}v8"
            body.append(f'<path class="ink-line" stroke="{INKS["ink"]}" stroke-width="1.3" d="{path}"/>')
        # Names that begin alike differ at their end.
        name = bar.name if len(bar.name) <= _MAX_NAME else f"\u2026{bar.name[1 - _MAX_NAME :]}"
        body.append(text_at(left - 7, top + _BAR - 4, name, "end", "ink"))
        body.append(text_at(end + 6, top + _BAR - 4, short(bar.value), "start", "ink"))
    body.append(text_at((left + right) / 2, bottom + 38, axis.titled(bars.x_label), "middle", "soft"))
    described = "; ".join(f"{bar.name}: {short(bar.value)}" for bar in bars.bars)
    return picture(bars.title, described, bottom + 46, body)
