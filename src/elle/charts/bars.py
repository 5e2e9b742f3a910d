"""Horizontal bars as inline SVG: one quantity of several things, with its std."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elle.charts.axis import linear_axis
from elle.charts.svg import COLOURS, GLYPH, INKS, WIDTH, picture, rule, short, text_at

_ROW, _BAR = 30.0, 17.0
_BESIDE = 20
"""Characters of a name that stands beside its bar; where one is longer, all stand above theirs."""
_LINE = 18.0
_ABOVE, _BEGINNING = int(WIDTH / GLYPH) - 2, 20
"""Characters that fit above a bar, and of a longer name so many of its beginning, the method."""


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
    longest = max((len(bar.name) for bar in bars.bars), default=1)
    above = _LINE if longest > _BESIDE else 0.0
    left = 12.0 if above else longest * GLYPH + 10
    right = WIDTH - 8 * GLYPH
    axis = linear_axis([0.0, *(bar.value + (bar.std or 0) for bar in bars.bars)])
    bottom = 8 + (_ROW + above) * len(bars.bars)

    def x(value: float) -> float:
        return left + (right - left) * axis.place(value)

    body = []
    room = (right - left) / max(1, len(axis.ticks) - 1)
    stride = math.ceil((max(map(len, axis.labels)) + 1) * GLYPH / room)
    for number, (tick, label) in enumerate(zip(axis.ticks, axis.labels, strict=True)):
        body.append(rule("grid", f"M{x(tick):.1f} 4V{bottom:.1f}"))
        if number % stride == 0:
            body.append(text_at(x(tick), bottom + 18, label, "middle", "soft"))
    for row, bar in enumerate(bars.bars):
        top = 8 + (_ROW + above) * row + above + (_ROW - _BAR) / 2
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
        if above:
            body.append(text_at(left, top - 6, _shortened(bar.name), "start", "ink"))
        else:
            body.append(text_at(left - 7, top + _BAR - 4, bar.name, "end", "ink"))
        body.append(text_at(end + 6, top + _BAR - 4, short(bar.value), "start", "ink"))
    body.append(text_at((left + right) / 2, bottom + 38, axis.titled(bars.x_label), "middle", "soft"))
    described = "; ".join(f"{bar.name}: {short(bar.value)}" for bar in bars.bars)
    return picture(bars.title, described, bottom + 46, body)


def _shortened(name: str) -> str:
    """The name without its middle, where it does not fit: names that begin alike differ at their end."""
    return name if len(name) <= _ABOVE else f"{name[:_BEGINNING]}\u2026{name[_BEGINNING + 1 - _ABOVE :]}"
