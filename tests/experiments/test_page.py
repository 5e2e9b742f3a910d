"""The report page: well formed, self-contained, escaped, and never a coordinate that is not a number."""

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elle.charts.axis import linear_axis, log_axis
from elle.charts.lines import Chart, Series, draw
from elle.charts.svg import COLOURS
from elle.errors import WorkError
from elle.experiments import page
from elle.experiments.page import Table, render, write_page

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "img", "hr", "input"}
NASTY = "<script>alert('x')</script> & \"quoted\" \x00\x1b\ud800"
EPOCHS = list(range(1, 41))


def chart(*series: Series, **settings: object) -> Chart:
    return Chart("A title", "epoch", "a value", series, **settings)  # type: ignore[arg-type]


def example() -> list[Table | Chart]:
    fgsm = Series("fgsm", EPOCHS, [0.35 if epoch < 22 else 0.0 for epoch in EPOCHS])
    elle = Series("elle-a", EPOCHS, [0.45 * epoch / 40 for epoch in EPOCHS])
    error = Series("elle-a", EPOCHS, [1e-4 * 1.19**epoch for epoch in EPOCHS])
    rows = [["fgsm", "84.1%", "0.0%"], ["elle-a", "77.0%", "45.0%"]]
    return [
        Table("Results", ["method", "clean", "PGD-20"], rows, frozenset({0})),
        chart(fgsm, elle, percent=True, marks=[(22, "collapse")], note="A note."),
        chart(error, Series("trades", [1], [0.1]), log=True),
    ]


def parse(svg: str) -> ElementTree.Element:
    """Parse, and check every number that places something."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for element in root.iter():
        for name in ("x", "y", "points", "d", "transform"):
            assert not re.search(r"nan|inf", element.attrib.get(name, ""), re.IGNORECASE)
        for pair in element.attrib.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    return root


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def colours(svg: str) -> dict[str, str]:
    """Series name -> its line's colour, from the markers' titles."""
    titles = re.findall(r'class="dot c\d" fill="(#\w+)"[^>]*><title>([^,<]*),', svg)
    return {name: colour for colour, name in titles}


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(page.__file__).parents[2]), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)


def test_the_page_is_well_formed_and_complete() -> None:
    reader = Reader(render("A page", "First.\n\nSecond.", example(), "The end."))
    tags = [tag for tag, _ in reader.tags]
    assert ("html", {"lang": "en"}) in reader.tags
    assert tags.count("svg") == tags.count("figure") == 2
    assert tags.count("caption") == 1
    assert [attributes["scope"] for tag, attributes in reader.tags if tag == "th"] == ["col"] * 3 + ["row"] * 2
    assert {"First.", "Second.", "The end.", "A note.", "Results", "collapsed"} <= set(reader.text)
    assert sum(attributes.get("class") == "bad" for tag, attributes in reader.tags if tag == "tr") == 1
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"] == "A title"


def test_the_page_needs_nothing_from_outside() -> None:
    text = render("A page", "Lead", example())
    tags = {tag for tag, _ in Reader(text).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not re.search(r"https?://|url\(|@import|src=|href=", text.replace("http://www.w3.org/2000/svg", ""))
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_everything_given_is_escaped() -> None:
    nasty = Chart(NASTY, NASTY, NASTY, [Series(NASTY, [1, 2], [1, 2])], note=NASTY, marks=[(1, NASTY)])
    text = render(NASTY, NASTY, [nasty, Table(NASTY, [NASTY], [[NASTY]], frozenset({0}))], NASTY)
    text.encode("utf-8")
    reader = Reader(text)
    assert "script" not in {tag for tag, _ in reader.tags}
    assert sum("<script>alert('x')</script> & \"quoted\"" in piece for piece in reader.text) >= 6
    parse(draw(nasty))


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


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [3.0], [-2.0, -2.0], [1e-7, 5e-7, -2e-7], [0, 1e140], [-1e140, 1e140], [1e-140], [1.0, 1.0 + 1e-15]],
)
@pytest.mark.parametrize("options", [{}, {"tight": True}, {"percent": True}, {"tight": True, "whole": True}])
def test_linear_ticks_lie_on_the_axis_and_increase(values: list[float], options: dict[str, bool]) -> None:
    axis = linear_axis(values, **options)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 1 <= len(axis.ticks) <= 12
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert len(set(axis.labels)) == len(axis.labels)


@pytest.mark.parametrize(
    "values", [[], [1e-3], [2.1, 4.9], [1e-4, 1e-1], [0.5, 60], [1e-140, 1e140], [1e140], [1e-140]]
)
def test_log_ticks_lie_on_the_axis_and_increase(values: list[float]) -> None:
    axis = log_axis(values)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 2 <= len(axis.ticks) <= 7
    assert all(axis.low <= value <= axis.high for value in (*axis.ticks, *values))
    assert len(set(axis.labels)) == len(axis.labels)


def test_ticks_are_the_ones_a_person_would_choose() -> None:
    assert linear_axis([0.1, 0.95], percent=True).labels == ("0%", "20%", "40%", "60%", "80%", "100%")
    assert linear_axis([0.12, 0.18], percent=True).labels == ("0%", "5%", "10%", "15%", "20%")  # lines at a large eps
    assert linear_axis([0.0], percent=True).labels == ("0%", "1%", "2%", "3%", "4%", "5%")
    assert linear_axis([0, 0]).labels[0] == "0.0"  # a weight that was never on
    assert linear_axis([0, 30]).labels == ("0", "10", "20", "30")
    assert linear_axis([1, 40], tight=True, whole=True).labels == ("10", "20", "30", "40")
    assert linear_axis([1, 3], tight=True, whole=True).labels == ("1", "2", "3")
    assert linear_axis([1, 12], tight=True, whole=True).ticks == (2, 4, 6, 8, 10, 12)  # not every 2.5 epochs
    assert linear_axis([0, 300_000], tight=True).factor == "\u00d710\u00b3"
    powers = ("10\u207b\u2074", "10\u207b\u00b3", "10\u207b\u00b2", "10\u207b\u00b9")
    assert log_axis([1e-4, 1e-1]).labels == powers
    assert log_axis([0.012, 0.05]).labels == ("0.01", "0.02", "0.05")


def test_a_long_name_may_break_and_a_short_one_may_not() -> None:
    """On a phone the first column stays in sight: a name of one line would hide the numbers under it."""
    name = "digits-n-fgsm+elle-a-eps0.1-seed0-df82d0aa"
    page = render("Runs", "", [Table("Runs", ("Run", "Reason"), [[name, "elle: " + 9 * "word "], ["elle-a", "1.0"]])])
    assert f'<th scope="row" class="long">{name}</th><td class="long">elle: word' in page
    assert '<th scope="row">elle-a</th><td>1.0</td>' in page


def test_a_leader_over_the_plot_does_not_pass_for_a_line() -> None:
    """A method that was measured at the first radius only, and one at both."""
    early, late = Series("pgd-10", [16, 26], [0.25, None]), Series("elle", [16, 26], [0.18, 0.12])
    other = Series("elle-a", [16, 26], [0.18, 0.12])  # its name is moved aside
    leaders = [path for path in parse(draw(chart(early, late, other))).iter(SVG + "path")
               if "leader" in path.attrib["class"]]  # fmt: skip
    assert sorted("stroke-dasharray" in path.attrib for path in leaders) == [False, True]


numbers = st.none() | st.floats() | st.integers() | st.sampled_from([0.0, 1e-140, 1e140, 5e-324, 1.7e308, 10**400])
points = st.lists(st.tuples(st.floats() | st.integers(-10, 10**6), numbers), max_size=8)


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


def test_a_name_has_one_colour_on_the_whole_page() -> None:
    first = chart(Series("fgsm", [0, 1], [0, 1]), Series("elle-a", [0, 1], [1, 0]))
    second = chart(Series("trades", [0, 1], [0, 1]), Series("elle-a", [0, 1], [1, 0]))
    text = render("t", "l", [first, Table("c", ["m"], []), second])
    figures = text.split("<svg")[1:]
    one, two = colours(figures[0]), colours(figures[1])
    assert one["elle-a"] == two["elle-a"] == COLOURS[1][0]
    assert len({one["fgsm"], two["elle-a"], two["trades"]}) == 3


def test_a_long_line_is_thinned_but_keeps_its_extremes() -> None:
    y = [0.5] * 50_000
    y[12_345], y[33_333] = 1.0, 0.0
    root = parse(draw(chart(Series("a", range(50_000), y), percent=True)))
    (line,) = root.iter(SVG + "polyline")
    heights = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert len(heights) <= 1300
    assert max(heights) - min(heights) == pytest.approx(225.0, abs=0.2)


def test_columns_of_numbers_stand_to_the_right() -> None:
    rows = [["a", "84.1 %", "8/255", "fgsm", "\u2013"], ["b", "-1.2e-3", "0.5 \u00b1 0.1", "3d", "12 s"]]
    tags = Reader(render("t", "l", [Table("c", list("vwxyz"), rows)])).tags
    assert [a.get("class") == "number" for tag, a in tags if tag == "td"] == [True, True, False, True] * 2


def test_a_row_says_it_collapsed_unless_the_table_does() -> None:
    said = Table("c", ["method", "verdict"], [["fgsm", "Collapsed at 22"]], frozenset({0}))
    assert 'class="tag"' not in render("t", "l", [said])
    assert 'class="tag"' in render("t", "l", [Table("c", ["method"], [["fgsm"]], frozenset({0}))])


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(ValueError, match="2 x values, 1 y"):
        Series("a", [1, 2], [1])
    with pytest.raises(ValueError, match="2 columns, 1 cells"):
        Table("t", ["a", "b"], [["1"]])


def test_the_same_input_gives_the_same_bytes() -> None:
    code = (
        "from elle.charts.lines import *; from elle.experiments.page import *; "
        "lines = [Series(name, [1, 2, 3], [1, None, 3]) for name in 'abcdefghij']; "
        "print(render('t', 'l', [Chart('c', 'x', 'y', lines), Table('t', ['a'], [['1']], frozenset({0}))]))"
    )
    pages = {run(code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}
    assert len(pages) == 1
    assert pages.pop().startswith("<!doctype html>")


def test_the_page_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(path, "First", "l", example())
    before = path.read_bytes()
    assert before.startswith(b"<!doctype html>")
    assert os.listdir(path.parent) == ["report.html"]

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(WorkError, match="could not write .*report.html: disk full"):
        write_page(path, "Second", "l", example())
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["report.html"]


def test_the_modules_need_the_standard_library_only() -> None:
    code = "import sys, elle.experiments.page; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    assert run(code).stdout.strip() == "set()"


def test_names_with_hyphens_do_not_break_in_headings_either():
    chart = Chart("PGD-20, wide-resnet-28-10", "x", "y", [Series("a", [0, 1], [0, 1])])
    text = render("N-FGSM and ELLE-A", "lead", [chart, Table("Clean: wide-resnet-28-10", ["a"], [["1"]])])
    assert "<h1><span>N-FGSM</span> and <span>ELLE-A</span></h1>" in text
    assert "<h2><span>PGD-20,</span> <span>wide-resnet-28-10</span></h2>" in text
    assert "<caption>Clean: <span>wide-resnet-28-10</span></caption>" in text
    assert re.search(r"h1 span, h2 span \{ white-space: nowrap \}", text)


def test_the_head_of_a_table_stays_with_its_rows_on_paper():
    printed = render("t", "l", []).partition("@media print {")[2]
    assert "caption, thead, tbody tr:first-child { break-after: avoid }" in printed


def test_the_first_column_stands_still_on_paper():
    printed = render("t", "l", []).partition("@media print {")[2]
    assert "th:first-child { position: static; background: none }" in printed  # sticky, it covers the lines there


def test_nine_methods_fit_on_a_page_of_paper():
    """Figure 3's, whose last column was cut off: what does not fit on paper cannot be scrolled to."""
    printed = render("t", "l", []).partition("@media print {")[2]
    assert "th, td { padding: .4rem .5rem }" in printed
