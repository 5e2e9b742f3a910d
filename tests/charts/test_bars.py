"""Bars: their lengths, their names and their axis."""

import re
from itertools import pairwise

import pytest

from elle.charts.bars import Bar, Bars, draw_bars
from elle.charts.svg import GLYPH, WIDTH


def test_bars_are_as_long_as_their_values():
    drawn = draw_bars(Bars("t", "seconds", [Bar("a", 10.0), Bar("b", 20.0, 1.0)]))
    widths = [float(part.split('"')[0]) for part in drawn.split(' width="')[1:]]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def test_long_names_of_bars_that_begin_alike_are_told_apart():
    names = [f"n-fgsm+elle-a, method.weight.history={value}" for value in (100, 500)]
    picture = draw_bars(Bars("Time", "seconds", [Bar(name, 1.0) for name in names]))
    assert "history=100<" in picture
    assert "history=500<" in picture


def test_names_too_long_to_stand_beside_their_bars_stand_above_them_with_their_method():
    names = [
        "n-fgsm+elle-a, method.weight.negligible=0.001",
        "elle-a, " + "a-very-long-setting, " * 3 + "batch=64",
        "fgsm",
    ]
    drawn = draw_bars(Bars("Time", "seconds", [Bar(name, 1.0) for name in names]))
    texts = re.findall(r'<text class="ink" x="([0-9.]+)" y="([0-9.]+)" text-anchor="start"[^>]*>([^<]*)<', drawn)
    shown = [(float(x), float(y), text) for x, y, text in texts if text != "1.00"]
    bars = [(float(x), float(y)) for x, y in re.findall(r'<rect .* x="([0-9.]+)" y="([0-9.]+)"', drawn)]
    beginning, end = shown[1][2].split("\u2026")
    assert names[1].startswith(beginning)
    assert names[1].endswith(end)
    assert [text for _, _, text in shown] == [names[0], shown[1][2], "fgsm"]
    for (x, y, text), (left, top) in zip(shown, bars, strict=True):
        assert (x, y < top, x + GLYPH * len(text) < WIDTH) == (left, True, True)


def test_the_ticks_of_bars_with_long_names_do_not_overlap():
    drawn = draw_bars(Bars("Time", "seconds", [Bar("elle-a, method.weight.next_step=true", 2.35), Bar("elle-a", 1.2)]))
    soft = re.findall(r'<text class="soft" x="([0-9.]+)" y="[0-9.]+" text-anchor="middle"', drawn)
    *places, _ = map(float, soft)  # and the axis's name
    assert min(b - a for a, b in pairwise(places)) > 3 * GLYPH


def test_a_value_keeps_the_zeros_at_its_end_so_that_all_are_as_precise():
    drawn = draw_bars(Bars("Time", "seconds", [Bar(str(value), value) for value in (1.396, 1.43, 12.0, 99.96, 303.6)]))
    for told in ("1.40", "1.43", "12.0", "100", "304"):
        assert f">{told}<" in drawn
