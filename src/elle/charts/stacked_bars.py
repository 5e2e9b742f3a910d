"""Stacked bars as inline SVG, with the standard library only: what a whole consists of, for several things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elle.charts.axis import linear_axis
from elle.charts.svg import COLOURS, GLYPH, ROW, WIDTH, escape, picture, rule, short, text_at

BAR, GAP, TOP = 15.0, 9.0, 42.0


@dataclass(frozen=True)
class StackedBars:
    """One bar a name, of as many parts as there are `parts`; its whole is written at its end."""

    title: str
    x_label: str
    parts: Sequence[str]
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    """values[i][k]: part k of names[i]"""
    note: str = ""


def draw_stacked_bars(bars: StackedBars) -> str:
    """The bars as an `<svg>`, from top to bottom, with the parts' names above."""
    axis = linear_axis([0.0, *map(sum, bars.values)])
    left = max(map(len, bars.names), default=0) * GLYPH + 10
    right = WIDTH - 8 * GLYPH
    bottom = TOP + len(bars.names) * (BAR + GAP)

    def place(value: float) -> float:
        return left + (right - left) * axis.place(value)

    body = []
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        body.append(rule("grid", f"M{place(tick):.1f} {TOP - 6:.1f}V{bottom:.1f}"))
        body.append(text_at(place(tick), bottom + 16, label, "middle", "soft"))
    for i, (name, values) in enumerate(zip(bars.names, bars.values, strict=True)):
        y = TOP + i * (BAR + GAP)
        body.append(text_at(left - 6, y + BAR - 3, name, "end"))
        for k, value in enumerate(values):
            start = sum(values[:k])
            shape = f'x="{place(start):.1f}" y="{y:.1f}" width="{place(start + value) - place(start):.1f}"'
            told = f"<title>{escape(f'{name}, {bars.parts[k]}: {value:.3g}')}</title>"
            body.append(f'<rect class="dot c{k}" {shape} height="{BAR}" fill="{COLOURS[k][0]}">{told}</rect>')
        body.append(text_at(place(sum(values)) + 5, y + BAR - 3, short(sum(values)), kind="soft"))
    x = left
    for k, part in enumerate(bars.parts):
        body.append(f'<rect class="dot c{k}" x="{x:.1f}" y="6" width="11" height="11" fill="{COLOURS[k][0]}"/>')
        body.append(text_at(x + 16, 16, part))
        x += 30 + len(part) * GLYPH
    body.append(text_at((left + right) / 2, bottom + 16 + ROW, axis.titled(bars.x_label), "middle", "soft"))
    described = "; ".join(f"{name}: {sum(values):.3g}" for name, values in zip(bars.names, bars.values, strict=True))
    return picture(bars.title, described, bottom + 24 + ROW, body)
