"""Schedules have their exact values at their ends, peaks and drops."""

import math
from typing import get_args

import pytest

from elle.config import Config, load_config
from elle.core.schedules import SCHEDULES, piecewise_linear, steps_down, warm_cosine


@pytest.mark.parametrize(("fraction", "multiplier"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.5), (0.9, 0.2), (1, 0)])
def test_short_rises_to_one_half_way_and_falls_back(fraction, multiplier):
    assert SCHEDULES["short"].rate(fraction) == pytest.approx(multiplier, abs=1e-12)


@pytest.mark.parametrize(
    ("fraction", "multiplier"),
    [(0, 1), (0.499999, 1), (0.5, 0.1), (0.749999, 0.1), (0.75, 0.01), (1, 0.01)],
)
def test_long_drops_at_one_half_and_three_quarters(fraction, multiplier):
    assert SCHEDULES["long"].rate(fraction) == SCHEDULES["long-svhn"].rate(fraction)
    assert SCHEDULES["long"].rate(fraction) == pytest.approx(multiplier)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_stays_between_zero_and_one(name):
    for course in (SCHEDULES[name].rate, SCHEDULES[name].eps):
        values = [course(step / 3000) for step in range(3001)]
        assert min(values) >= 0
        assert max(values) == pytest.approx(1)


@pytest.mark.parametrize(
    ("epoch", "rate"), [(0, 0), (0.5, 0.2), (1, 0.4), (3.5, 0.22), (6, 0.04), (9, 0.022), (12, 0.004), (15, 0.0004)]
)
def test_the_rate_on_imagenet_passes_through_the_published_points(epoch, rate):
    schedule = SCHEDULES["imagenet-15"]
    assert schedule.lr * schedule.rate(epoch / schedule.epochs) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("epoch", "rate", "eps"), [(0, 0, 0), (2.5, 5 / 12, 0.5), (5, 5 / 6, 1), (6, 1, 1), (15, 0, 1)]
)
def test_on_svhn_the_rate_peaks_at_two_fifths_and_eps_grows_for_five_epochs(epoch, rate, eps):
    short = SCHEDULES["short-svhn"]
    assert short.rate(epoch / short.epochs) == pytest.approx(rate, abs=1e-12)
    assert short.eps(epoch / short.epochs) == pytest.approx(eps)
    assert SCHEDULES["long-svhn"].eps(epoch / 200) == pytest.approx(eps)


@pytest.mark.parametrize("fraction", [0, 0.001, 0.3, 1])
@pytest.mark.parametrize("name", ["short", "long", "long-cos", "cos-1000", "imagenet-15"])
def test_elsewhere_eps_is_its_value_throughout(name, fraction):
    assert SCHEDULES[name].eps(fraction) == 1


def test_the_cosine_rises_from_its_start_and_falls_to_nothing():
    course = warm_cosine(peak=0.2, start=0.1)
    assert [course(at) for at in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx([0.1, 0.55, 1, 0.5, 0], abs=1e-12)
    assert course(0.4) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("name", ["long-cos", "cos-1000"])
def test_the_published_cosine_rises_from_a_twenty_fifth_within_the_first_fortieth(name):
    found = [SCHEDULES[name].rate(at) for at in (0, 1 / 80, 1 / 40, 41 / 80, 1)]
    assert found == pytest.approx([0.04, 0.52, 1, 0.5, 0], abs=1e-12)


def test_every_schedule_is_a_value_of_its_key():
    (names, _) = get_args(Config.model_fields["schedule"].annotation)
    assert list(get_args(names)) == list(SCHEDULES)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data=svhn"], ("short-svhn", 15, 0.05, 128)),
        (["data=svhn", "schedule=long-svhn"], ("long-svhn", 200, 0.01, 128)),
        (["data=cifar10"], ("short", 30, 0.2, 128)),
        (["data=cifar10", "schedule=long"], ("long", 200, 0.1, 128)),
        (["data=cifar10", "schedule=long-cos"], ("long-cos", 200, 0.1, 256)),
        (["data=cifar10", "schedule=cos-1000"], ("cos-1000", 1000, 0.02, 256)),
        (["data=cifar10", "schedule=cos-1000", "epochs=5"], ("cos-1000", 5, 0.02, 256)),
        (["data=cifar10", "schedule=short-svhn"], ("short-svhn", 15, 0.05, 128)),
        (["data=cifar10", "schedule=imagenet-15"], ("imagenet-15", 15, 0.4, 512)),
        (["data=svhn", "schedule=short"], ("short", 30, 0.2, 128)),
        (["data=imagenet"], ("imagenet-15", 15, 0.2, 256)),
        (["data=digits", "schedule=short"], ("short", 30, 0.1, 64)),
    ],
)
def test_a_schedule_brings_its_epochs_rate_and_batch_and_a_dataset_brings_its_schedule(words, expected):
    whole = load_config(words).resolved()
    assert (whole.schedule, whole.epochs, whole.lr, whole.batch) == expected


@pytest.mark.parametrize(("fraction", "multiplier"), [(0, 2), (0.1, 3), (0.2, 4), (0.6, 2), (1, 0)])
def test_straight_lines_pass_through_their_points(fraction, multiplier):
    assert piecewise_linear([(0, 2), (0.2, 4), (1, 0)])(fraction) == pytest.approx(multiplier)


def test_after_its_last_point_a_piecewise_schedule_is_constant():
    assert piecewise_linear([(0, 0), (0.25, 1)])(0.8) == 1


def test_each_drop_divides_by_ten():
    schedule = steps_down([0.2, 0.4, 0.6])
    assert [schedule(at) for at in (0.1, 0.2, 0.5, 0.9)] == pytest.approx([1, 0.1, 0.01, 0.001])
