"""A chart, and its drawing read back."""

import re
from xml.etree import ElementTree

from elle.charts.lines import Chart, Series

SVG = "{http://www.w3.org/2000/svg}"


def chart(*series: Series, **settings: object) -> Chart:
    return Chart("A title", "epoch", "a value", series, **settings)  # type: ignore[arg-type]


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
