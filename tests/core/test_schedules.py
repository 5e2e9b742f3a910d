"""Schedules have their exact values at their ends, peaks and drops."""

import pytest

from elle.core.schedules import SCHEDULES, piecewise_linear, steps_down


@pytest.mark.parametrize(("fraction", "multiplier"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.5), (0.9, 0.2), (1, 0)])
def test_short_rises_to_one_half_way_and_falls_back(fraction, multiplier):
    assert SCHEDULES["short"](fraction) == pytest.approx(multiplier, abs=1e-12)


@pytest.mark.parametrize(
    ("fraction", "multiplier"),
    [(0, 1), (0.499999, 1), (0.5, 0.1), (0.749999, 0.1), (0.75, 0.01), (1, 0.01)],
)
def test_long_drops_at_one_half_and_three_quarters(fraction, multiplier):
    assert SCHEDULES["long"](fraction) == pytest.approx(multiplier)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_stays_between_zero_and_one(name):
    values = [SCHEDULES[name](step / 1000) for step in range(1001)]
    assert min(values) >= 0
    assert max(values) == 1


@pytest.mark.parametrize(("fraction", "multiplier"), [(0, 2), (0.1, 3), (0.2, 4), (0.6, 2), (1, 0)])
def test_straight_lines_pass_through_their_points(fraction, multiplier):
    assert piecewise_linear([(0, 2), (0.2, 4), (1, 0)])(fraction) == pytest.approx(multiplier)


def test_after_its_last_point_a_piecewise_schedule_is_constant():
    assert piecewise_linear([(0, 0), (0.25, 1)])(0.8) == 1


@pytest.mark.parametrize("factor", [0.1, 0.5])
def test_each_drop_multiplies_by_the_factor(factor):
    schedule = steps_down([0.2, 0.4, 0.6], factor)
    assert [schedule(at) for at in (0.1, 0.2, 0.5, 0.9)] == pytest.approx([1, factor, factor**2, factor**3])
