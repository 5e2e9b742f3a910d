"""What is set of a method, by the user or by its authors, reaches the part it belongs to; what cannot be is refused."""

import math

import pytest

from elle.core.attacks import SignStep
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity
from elle.errors import InputError
from elle.methods import METHODS, configured


def test_the_weight_of_a_configured_method_is_that_of_its_penalty():
    assert configured("elle", weight=7).weight == Constant(7)
    assert configured("elle-a", weight=7).weight == OnOff(7)
    assert configured("elle").weight == Constant(1000)


def test_an_option_of_the_weight_wins_over_the_short_form():
    assert configured("elle", weight=7, options={"weight": {"value": 9}}).weight == Constant(9)


def test_a_weight_does_not_disturb_a_method_without_a_penalty():
    assert configured("fgsm", weight=7) == METHODS["fgsm"]


def test_the_norm_reaches_the_attack_and_the_regulariser():
    method = configured("n-fgsm+elle-a", norm="l2")
    assert (method.attack.norm, method.regulariser.norm) == ("l2", "l2")
    assert method.attack.noise == 2
    assert configured("standard", norm="l2") == METHODS["standard"]


@pytest.mark.parametrize("name", ["gradalign", "cure", "llr", "grad-penalty"])
def test_the_norm_reaches_a_penalty_on_input_gradients(name):
    assert configured(name, norm="l2").loss.norm == "l2"
    assert configured(name).loss.norm == "linf"


@pytest.mark.parametrize("name", ["gradalign", "cure", "llr"])
def test_a_radius_of_another_norm_is_not_looked_up_among_those_of_linf(name):
    at_8 = configured(name, eps=8 / 255).loss.weight
    assert configured(name, eps=0.5).loss.weight > at_8
    assert configured(name, eps=0.5, norm="l2").loss.weight == at_8


@pytest.mark.parametrize("name", ["gat", "slat", "fast-bat", "advmixup", "standard", "llr-original"])
def test_the_two_point_form_is_refused_where_the_network_is_not_trained_at_the_attack_s_points(name):
    with pytest.raises(InputError, match=f"form=2p needs the attack's points, where {name}"):
        configured(f"{name}+elle", options={"regulariser": {"form": "2p"}})
    assert configured("trades+elle", options={"regulariser": {"form": "2p"}}).regulariser.form == "2p"


def test_the_two_point_form_is_refused_where_its_gradient_would_move_the_attack():
    with pytest.raises(InputError, match="form=2p is not for free.elle: its perturbation would go up the penalty too"):
        configured("free+elle", options={"regulariser": {"form": "2p"}})


def test_clipping_reaches_the_attack_and_the_regulariser_unless_an_option_says_otherwise():
    method = configured("elle-a", clip=True)
    assert (method.attack.clip, method.regulariser.clip) == (True, True)
    method = configured("elle-a", clip=True, options={"attack": {"clip": False}})
    assert (method.attack.clip, method.regulariser.clip) == (False, True)
    assert configured("standard", clip=True) == METHODS["standard"]


def test_options_replace_fields_of_their_part_alone():
    options = {
        "attack": {"noise": 3, "clip": True},
        "regulariser": {"samples": 2, "alpha": 0.5},
        "weight": {"decay": 0.9, "history": 500},
    }
    method = configured("n-fgsm+elle-a", options=options)
    assert method.attack == SignStep(noise=3, project=False, clip=True)
    assert method.regulariser == Linearity(samples=2, alpha=0.5)
    assert method.weight == OnOff(4000, decay=0.9, history=500)
    assert METHODS["n-fgsm+elle-a"].attack == SignStep(noise=2, project=False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fgsm", {"atack": {"noise": 1}}, "has no part 'atack'; it has attack"),
        ("fgsm", {"weight": {"value": 1}}, "has no part 'weight'"),
        ("standard", {"attack": {"noise": 1}}, "it has loss"),
        ("fgsm", {"attack": {"noize": 1}}, "did you mean 'noise'"),
        ("elle", {"weight": {"decay": 0.5}}, "method.weight has value"),
        ("elle-a", {"weight": {"sensitvity": 1}}, "did you mean 'sensitivity'"),
        ("fgsm", {"attack": {"steps": 0}}, "steps"),
        ("fgsm", {"attack": {"norm": "l1"}}, "norm"),
        ("elle", {"weight": {"value": -1}}, "weight"),
        ("elle", {"weight": {"value": math.nan}}, "weight"),
        ("elle-a", {"weight": {"history": 2}}, "history"),
        ("elle", {"regulariser": {"alpha": "half"}}, "alpha"),
        ("elle", {"regulariser": {"samples": 0}}, "samples"),
    ],
)
def test_a_bad_option_is_refused_with_what_would_be_right(name, options, message):
    with pytest.raises(InputError, match=message) as problem:
        configured(name, options=options)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("attack", "noise", "big"),
        ("attack", "alpha", "uniform"),
        ("attack", "steps", 2.5),
        ("attack", "steps", True),
        ("attack", "project", "yes"),
        ("attack", "project", 3),
        ("attack", "noise", None),
        ("attack", "norm", 2),
        ("regulariser", "samples", 1.5),
        ("regulariser", "clip", 0.5),
        ("weight", "value", "big"),
        ("weight", "decay", "slow"),
        ("weight", "history", 10.5),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(part, field, value):
    with pytest.raises(InputError, match=field):
        configured("elle-a", options={part: {field: value}})


def test_a_switch_is_true_or_false_as_these_are_written():
    with pytest.raises(InputError, match="method.attack.project='True' should be true or false"):
        configured("elle-a", options={"attack": {"project": "True"}})


@pytest.mark.parametrize(
    ("name", "data", "levels", "expected"),
    [
        ("gradalign", "cifar10", 8, 0.2),
        ("gradalign", "cifar10", 16, 2.0),
        ("gradalign", "cifar10", 26, 2.0),
        ("gradalign", "cifar10", 4, 0.02 * 10**0.5),
        ("gradalign", "svhn", 8, 2.5),
        ("gradalign", "svhn", 16, 4.0),
        ("llr", "cifar10", 2, 200),
        ("llr", "cifar10", 8, 200),
        ("llr", "cifar10", 10, 500),
        ("llr", "cifar10", 12, 500),
        ("llr", "cifar10", 14, 1_000),
        ("llr", "cifar10", 16, 500),
        ("llr", "cifar10", 18, 1_000),
        ("llr", "cifar10", 20, 500),
        ("llr", "cifar10", 22, 2_000),
        ("llr", "cifar10", 24, 5_000),
        ("llr", "cifar10", 26, 2_000),
    ],
)
def test_a_row_takes_the_weight_its_authors_published(name, data, levels, expected):
    assert configured(name, data=data, eps=levels / 255).loss.weight == pytest.approx(expected)
    own = configured(name, data=data, eps=levels / 255, options={"loss": {"weight": 7.0}})
    assert own.loss.weight == 7


@pytest.mark.parametrize("name", ["n-fgsm", "n-fgsm+elle", "n-fgsm+elle-a"])
@pytest.mark.parametrize(
    ("data", "levels", "model", "noise"),
    [
        ("cifar10", 8, "preact-resnet18", 2),
        ("cifar10", 16, "preact-resnet18", 2),
        ("cifar10", 16, "wide-resnet28-10", 4),
        ("cifar10", 12, "wide-resnet28-10", 2),
        ("cifar100", 16, "wide-resnet28-10", 2),
        ("svhn", 12, "preact-resnet18", 3),
        ("svhn", 12, "wide-resnet28-10", 3),
        ("svhn", 10, "preact-resnet18", 2),
    ],
)
def test_n_fgsm_takes_the_noise_its_authors_published(name, data, levels, model, noise):
    assert configured(name, data=data, eps=levels / 255, model=model).attack.noise == noise
    own = configured(name, data=data, eps=levels / 255, model=model, options={"attack": {"noise": 1.5}})
    assert own.attack.noise == 1.5


@pytest.mark.parametrize(("levels", "rate"), [(2, 5000 / 255), (8, 5000 / 255), (10, 2000 / 255), (16, 2000 / 255)])
def test_fast_bat_takes_the_rate_of_its_radius(levels, rate):
    assert configured("fast-bat", data="cifar10", eps=levels / 255).loss.rate == pytest.approx(rate)
    assert configured("fast-bat", eps=levels / 255, options={"loss": {"rate": 3.0}}).loss.rate == 3


def test_cure_s_weight_is_the_paper_s_for_gradients_of_a_mean_over_128_images():
    for levels, weight in ((8, 1_000), (16, 50_000)):
        assert configured("cure", data="cifar10", eps=levels / 255).loss.weight * 128**2 == pytest.approx(weight)


def test_zerograd_takes_the_share_of_its_dataset():
    assert [configured("zerograd", data=data).attack.zero for data in ("cifar10", "cifar100", "svhn")] == [
        0.35,
        0.45,
        0.7,
    ]
