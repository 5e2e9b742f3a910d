"""Heat maps: a cell a value, and a scale that can be read."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from elle.charts.heatmap import Heatmap, draw_heatmap


def test_a_heat_map_has_a_cell_a_value_and_colours_from_low_to_high():
    svg = draw_heatmap(Heatmap("title <", "x", "y", [0, 1], [0, 1], [[0.0, 1.0], [float("nan"), 7.0]], 0.0, 1.0))
    cells = [rect for rect in ET.fromstring(svg).iter() if rect.tag.endswith("rect") and len(rect)]
    assert ">loss</text>" in svg
    assert [cell.get("fill") for cell in cells] == ["#440154", "#fde725", "#b0b0b0", "#fde725"]


@pytest.mark.parametrize("high", [0.0, 4e-4, 2.3, 5e6])
def test_no_number_of_the_scale_is_written_over_another(high):
    svg = draw_heatmap(Heatmap("title", "x", "y", [0, 1], [0, 1], [[0.0, high], [0.0, 0.0]], 0.0, high))
    texts = re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>', svg)
    beside = sorted(float(y) for x, y in texts if float(x) > 365)
    assert len(beside) >= 2  # the word and a number
    assert all(below - above >= 12 for above, below in itertools.pairwise(beside))


def test_the_scale_of_a_heat_map_tells_the_power_of_ten_that_its_labels_leave_out():
    svg = draw_heatmap(Heatmap("title", "x", "y", [0, 1], [0, 1], [[0.0, 1e-4], [2e-4, 4e-4]], 0.0, 4e-4))
    assert ">4</text>" in svg
    assert ">loss (\u00d710\u207b\u2074)</text>" in svg
