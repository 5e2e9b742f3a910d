"""Axes: ticks that lie on them, increase, and are the ones a person would choose."""

import pytest

from elle.charts.axis import linear_axis, log_axis


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
