"""Bars: their lengths, their names and their axis."""

import re
from itertools import pairwise

import pytest

from elle.charts.bars import Bar, Bars, draw_bars
from elle.charts.svg import GLYPH


def test_bars_are_as_long_as_their_values():
    drawn = draw_bars(Bars("t", "seconds", [Bar("a", 10.0), Bar("b", 20.0, 1.0)]))
    widths = [float(part.split('"')[0]) for part in drawn.split(' width="')[1:]]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def test_long_names_of_bars_that_begin_alike_are_told_apart():
    names = [f"n-fgsm+elle-a, method.weight.history={value}" for value in (100, 500)]
    picture = draw_bars(Bars("Time", "seconds", [Bar(name, 1.0) for name in names]))
    assert "history=100<" in picture
    assert "history=500<" in picture


def test_the_ticks_of_bars_with_long_names_do_not_overlap():
    drawn = draw_bars(Bars("Time", "seconds", [Bar("elle-a, method.weight.next_step=true", 2.35), Bar("elle-a", 1.2)]))
    soft = re.findall(r'<text class="soft" x="([0-9.]+)" y="[0-9.]+" text-anchor="middle"', drawn)
    *places, _ = map(float, soft)  # and the axis's name
    assert min(b - a for a, b in pairwise(places)) > 3 * GLYPH
