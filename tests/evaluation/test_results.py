"""Bits come back as they went, and two results are compared point by point."""

import numpy as np
import pytest

from elle.errors import InputError
from elle.evaluation.evaluate import assess
from elle.evaluation.results import compared, mcnemar, packed, unpacked
from tests.networks import images, smooth_net


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_bits_come_back(count):
    bits = np.random.default_rng(count).random(count) < 0.5
    assert unpacked(packed(bits), count).tolist() == bits.tolist()


def test_bits_of_another_count_are_refused():
    with pytest.raises(ValueError, match="2 bytes do not hold 8 points"):
        unpacked(packed(np.ones(9, bool)), 8)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 9, 22 / 1024), (9, 1, 22 / 1024), (0, 5, 2 / 32), (300, 200, 9.0e-6)],
)
def test_the_p_value_is_the_exact_one(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == pytest.approx(p, rel=0.01)


def record(survived, eps=0.1, name="digits", attack="fgsm"):
    survived = np.array(survived, bool)
    entry = {"accuracy": float(survived.mean()), "total": len(survived), "survived": packed(survived)}
    settings = {"eps": eps, "norm": "linf", "seed": 0, "engine": "fast", "precision": "fp32"}
    return settings | {"data": {"name": name, "count": len(survived)}, "attacks": {attack: entry}}


def test_two_results_name_the_points_they_disagree_on():
    result = compared(record([1, 1, 0, 0, 1]), record([1, 0, 1, 0, 0], eps=0.2))
    one = result["attacks"]["fgsm"]
    assert (one["only_a_breaks"], one["only_b_breaks"]) == ([2], [1, 4])
    assert one["difference"] == pytest.approx(-0.2)
    assert result["differing"] == {"eps": [0.1, 0.2]}
    assert "no difference shown: 1 against 2" in one["statement"]


def test_a_clear_difference_is_stated():
    one = compared(record([1] * 30), record([0] * 12 + [1] * 18))["attacks"]["fgsm"]
    assert one["statement"].startswith("A is more robust: 0 points broken in A alone, 12 in B alone")
    one = compared(record([0] + [1] * 29), record([1] + [0] * 12 + [1] * 17))["attacks"]["fgsm"]
    assert one["statement"].startswith("A is more robust: 1 point broken in A alone, 12 in B alone")
    same = compared(record([1] * 30), record([1] * 30))["attacks"]["fgsm"]
    assert same["statement"] == "the same points are broken"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (record([1, 1, 1]), "not on the same points: 2 of digits and 3 of digits"),
        (record([1, 1], name="mnist5k"), "not on the same points"),
        (record([1, 1], attack="pgd-20"), "share no attack: A has fgsm, B has pgd-20"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(other, message):
    with pytest.raises(InputError, match=message):
        compared(record([1, 0]), other)


@pytest.mark.parametrize(
    ("attack", "eps", "claim"),
    [
        ("fgsm", 0.1, "A is more robust"),
        ("fgsm", 0.2, "A was attacked otherwise and is broken less"),
        ("clean", 0.2, "A is more accurate"),
    ],
)
def test_a_result_is_called_more_robust_only_under_the_same_attack(attack, eps, claim):
    one, other = record([1] * 12, attack=attack), record([0] * 12, eps=eps, attack=attack)
    assert compared(one, other)["attacks"][attack]["statement"].startswith(claim)


def test_two_assessments_of_other_points_are_not_compared():
    model = smooth_net(64)
    x, y = images(8)
    record, same, other = (assess(model, values, y, "fgsm", 0.1) for values in (x, x.numpy(), 1 - x))
    assert compared(record, same)["attacks"]["fgsm"]["statement"] == "the same points are broken"
    with pytest.raises(InputError, match="not on the same points"):
        compared(record, other)
