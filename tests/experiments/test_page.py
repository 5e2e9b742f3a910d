"""The report page: well formed, self-contained and escaped, on a screen and on paper."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elle.charts.lines import Chart, Series, draw
from elle.charts.svg import COLOURS
from elle.errors import WorkError
from elle.experiments import page
from elle.experiments.page import Table, render, write_page

from ..charts.drawing import chart, parse

VOID = {"meta", "link", "br", "img", "hr", "input"}
NASTY = "<script>alert('x')</script> & \"quoted\" \x00\x1b\ud800"
EPOCHS = list(range(1, 41))


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


def test_a_long_name_may_break_and_a_short_one_may_not() -> None:
    """On a phone the first column stays in sight: a name of one line would hide the numbers under it."""
    name = "digits-n-fgsm+elle-a-eps0.1-seed0-df82d0aa"
    page = render("Runs", "", [Table("Runs", ("Run", "Reason"), [[name, "elle: " + 9 * "word "], ["elle-a", "1.0"]])])
    assert f'<th scope="row" class="long">{name}</th><td class="long">elle: word' in page
    assert '<th scope="row">elle-a</th><td>1.0</td>' in page


def test_a_name_has_one_colour_on_the_whole_page() -> None:
    first = chart(Series("fgsm", [0, 1], [0, 1]), Series("elle-a", [0, 1], [1, 0]))
    second = chart(Series("trades", [0, 1], [0, 1]), Series("elle-a", [0, 1], [1, 0]))
    text = render("t", "l", [first, Table("c", ["m"], []), second])
    figures = text.split("<svg")[1:]
    one, two = colours(figures[0]), colours(figures[1])
    assert one["elle-a"] == two["elle-a"] == COLOURS[1][0]
    assert len({one["fgsm"], two["elle-a"], two["trades"]}) == 3


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
