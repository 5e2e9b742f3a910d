"""Line charts: never a coordinate that is not a number, gaps, bands, and names that can be read."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elle.charts.lines import Chart, Series, _edges, draw

from .drawing import SVG, chart, parse

numbers = st.none() | st.floats() | st.integers() | st.sampled_from([0.0, 1e-140, 1e140, 5e-324, 1.7e308, 10**400])
points = st.lists(st.tuples(st.floats() | st.integers(-10, 10**6), numbers), max_size=8)


def test_gaps_split_the_line() -> None:
    y = [1.0, 2.0, None, 3.0, 4.0, math.nan, 5.0, math.inf, 6.0, 7.0]
    root = parse(draw(chart(Series("a", range(10), y))))
    lines = [line.attrib["points"].split() for line in root.iter(SVG + "polyline")]
    assert [len(points) for points in lines] == [2, 2, 2]
    titles = [title.text for title in root.iter(SVG + "title")]
    assert "a, epoch 6: 5" in titles  # a lone point shows as its marker


def test_on_a_log_axis_what_is_not_positive_is_a_gap() -> None:
    series = Series("a", range(6), [1e-4, 1e-3, 0.0, -1.0, 1e-2, 1e-1])
    lines = list(parse(draw(chart(series, log=True))).iter(SVG + "polyline"))
    assert len(lines) == 2
    heights = [float(pair.split(",")[1]) for line in lines for pair in line.attrib["points"].split()]
    steps = [a - b for a, b in pairwise(heights)]
    assert heights == sorted(heights, reverse=True)
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)


def test_a_leader_over_the_plot_does_not_pass_for_a_line() -> None:
    """A method that was measured at the first radius only, and one at both."""
    early, late = Series("pgd-10", [16, 26], [0.25, None]), Series("elle", [16, 26], [0.18, 0.12])
    other = Series("elle-a", [16, 26], [0.18, 0.12])  # its name is moved aside
    leaders = [path for path in parse(draw(chart(early, late, other))).iter(SVG + "path")
               if "leader" in path.attrib["class"]]  # fmt: skip
    assert sorted("stroke-dasharray" in path.attrib for path in leaders) == [False, True]


@settings(max_examples=150, deadline=None)
@given(st.lists(points, max_size=3), st.booleans(), st.booleans(), st.lists(st.floats(), max_size=3))
def test_no_data_breaks_the_drawing(data: list, log: bool, percent: bool, marks: list) -> None:
    series = [Series(f"s{i}", [x for x, _ in line], [y for _, y in line]) for i, line in enumerate(data)]
    root = parse(draw(chart(*series, log=log, percent=percent, marks=[(at, "mark") for at in marks])))
    for path in root.iter(SVG + "path"):
        if path.attrib["class"] == "grid":
            left, right = re.fullmatch(r"M([\d.]+) [\d.]+H([\d.]+)", path.attrib["d"]).groups()  # type: ignore[union-attr]
            assert float(right) - float(left) > 100


@pytest.mark.parametrize("count", [1, 7, 8, 30])
def test_names_do_not_overlap(count: int) -> None:
    svg = draw(chart(*(Series(f"method {i}", [0, 1], [0.5, 0.5 + 1e-3 * i]) for i in range(count))))
    root = parse(svg)
    names = [text for text in root.iter(SVG + "text") if (text.text or "").startswith("method")]
    places = {(text.attrib["x"], text.attrib["y"]) for text in names}
    assert len(places) == len(names) == count
    if count <= 7:
        heights = sorted(float(text.attrib["y"]) for text in names)
        assert all(b - a >= 17 for a, b in pairwise(heights))


def test_labels_of_marks_do_not_overlap() -> None:
    root = parse(draw(chart(Series("a", [0, 40], [0, 1]), marks=[(20, "fgsm collapses"), (21, "rs-fgsm collapses")])))
    heights = [text.attrib["y"] for text in root.iter(SVG + "text") if text.attrib["class"] == "mark"]
    assert len(set(heights)) == 2


def test_the_band_of_an_accuracy_ends_at_0_and_100_percent() -> None:
    svg = draw(Chart("t", "x", "y", [Series("a", [0, 1], [0.5, 0.5], spread=[0.7, 0.7])], percent=True))
    labels = re.findall(r">(-?\d+)%<", svg)
    assert (min(map(int, labels)), max(map(int, labels))) == (0, 100)


def test_a_long_line_is_thinned_but_keeps_its_extremes() -> None:
    y = [0.5] * 50_000
    y[12_345], y[33_333] = 1.0, 0.0
    root = parse(draw(chart(Series("a", range(50_000), y), percent=True)))
    (line,) = root.iter(SVG + "polyline")
    heights = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert len(heights) <= 1300
    assert max(heights) - min(heights) == pytest.approx(225.0, abs=0.2)


def test_a_band_needs_as_many_spreads_as_points():
    """And it is cut where one is not known: across the gap it would not lie around the line."""
    spread = [0.01, 0.02, None, 0.02, 0.01]
    chart = Chart("t", "x", "y", [Series("a", [1, 2, 3, 4, 5], [0.1, 0.2, 0.9, 0.2, 0.1], spread)])
    assert draw(chart).count("<polygon") == 2
    with pytest.raises(ValueError, match="spreads"):
        Series("a", [1, 2], [1, 2], [1])


def test_a_band_of_a_weight_does_not_go_below_zero():
    ends = [(1.0, 0.0, 70.0), (2.0, 20.0, 40.0)]
    assert _edges(Series("elle-a", [1, 2], [30, 30], [40, 10]), percent=False) == [ends]
    assert _edges(Series("change", [1], [-1], [2]), percent=False) == [[(1.0, -3.0, 1.0)]]
