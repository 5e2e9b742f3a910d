"""Each self-check speaks up for a network built to deserve it, and is quiet for an honest one."""

import warnings

import pytest
import torch
from torch import nn

from elle.evaluation.checks import check
from elle.evaluation.evaluate import assess, evaluate
from tests.networks import conv_net, images, trained


class Mean(nn.Module):
    """Class 1 where the mean pixel is above one half; `steepness` saturates the softmax."""

    def __init__(self, steepness=20.0):
        super().__init__()
        self.steepness = steepness

    def level(self, x):
        return x.flatten(1).mean(1) - 0.5

    def forward(self, x):
        level = self.steepness * self.level(x)
        return torch.stack([-level, level], 1)


class Randomised(Mean):
    def level(self, x):
        return super().level(x) + 0.05 * torch.randn(len(x))


class Transductive(Mean):
    """As a BatchNorm without running statistics: an image is judged by the others of its batch."""

    def level(self, x):
        return x.flatten(1).mean(1) - x.mean()


class Quantised(Mean):
    """Flat almost everywhere: no gradient, though a large enough step changes the answer."""

    def level(self, x):
        return super().level(x.mul(8).round().div(8))


class Softmaxed(Mean):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Thresholded(Mean):
    """No way back from the logits to the image."""

    def level(self, x):
        return super().level((x > 0.5).float())


class Detached(Mean):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Constant(nn.Module):
    def forward(self, x):
        return 0 * x.flatten(1)[:, :2] + torch.tensor([1.0, 0.0])


class Broken(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :2] * float("nan")


class Bumpy(Mean):
    """The answer alternates with the mean pixel: a wave of length pi / 30."""

    def forward(self, x):
        level = self.level(x)
        return torch.stack([-20 * torch.sin(60 * level), 20 * torch.sin(60 * level)], 1)


def grey(low, high, count=40):
    levels = torch.cat(
        [torch.linspace(0.5 - high, 0.5 - low, count // 2), torch.linspace(0.5 + low, 0.5 + high, count // 2)]
    )
    return levels.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous(), (levels > 0.5).long()


def failed(model, data, attack="clean,fgsm,pgd-10", eps=0.05):
    return {one["check"]: one["words"] for one in assess(model, *data, attack, eps)["checks"] if one["passed"] is False}


def test_an_honest_network_passes():
    x, y = images(60, seed=1)
    assert failed(trained(conv_net(), *images(64), steps=15, lr=0.05), (x, y), "clean,fgsm,pgd-10", 0.03) == {}


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        (Randomised(), "deterministic", "randomised or non-deterministic"),
        (Transductive(), "deterministic", "depends on the others of its batch"),
        (Quantised(), "gradients", "exactly 0 on 40 of 40 correct images"),
        (Constant(), "classifier", "answers class 0 on 40 of 40 images"),
        (Broken(), "classifier", "not a number on 40 of 40 images"),
        (Softmaxed(), "classifier", "gives probabilities, not logits"),
        (Mean(steepness=5000), "classifier", "saturated: its probability is exactly 1"),
        (Mean(steepness=1e41), "classifier", "or a logit infinite"),
    ],
)
def test_a_symptom_is_named(model, name, words):
    assert words in failed(model, grey(0.1, 0.3))[name]


def test_a_weak_network_is_judged_by_the_gradients_of_what_it_gets_right():
    """Attacks are asked about those images alone: that wrong ones have a gradient does not help them."""
    x, y = grey(0.1, 0.3)
    swapped = torch.cat([y[:2], 1 - y[2:]])
    assert "exactly 0 on 2 of 2 correct images" in failed(Quantised(), (x, swapped))["gradients"]


@pytest.mark.parametrize("network", [Thresholded, Detached])
def test_a_network_without_a_gradient_is_evaluated_and_said_to_have_none(network):
    record = assess(network(), *grey(0.01, 0.02), "clean,fgsm,apgd-ce,fab-t,square", 0.05)
    words = {one["check"]: one["words"] for one in record["checks"] if one["passed"] is False}
    assert "the gradient of the loss is exactly 0 on 40 of 40 correct images" in words["gradients"]
    assert "the gradient is masked" in words["black-box"]
    assert record["attacks"]["square"]["correct"] == 0


@pytest.mark.parametrize("network", [Thresholded, Detached])
def test_a_network_without_a_gradient_is_warned_of_where_there_is_no_record_to_say_it(network):
    images = grey(0.01, 0.02)
    with pytest.warns(UserWarning, match="no gradient by the image"):
        evaluate(network(), *images, "fgsm", 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assess(network(), *images, "fgsm", 0.05)
        evaluate(network(), *images, "clean", 0.05)


def test_a_single_step_far_above_many_is_named():
    """A step of 0.08 jumps over the half-wave in which the answer is wrong; shorter ones land in it."""
    x, y = grey(0.005, 0.02)
    words = failed(Bumpy(), (x, y), eps=0.08)["single-step"]
    assert "under FGSM" in words
    assert "collapse" in words


@pytest.mark.parametrize(
    ("others", "passes"),
    [
        ({"pgd-20": 24, "apgd-t": 11}, True),
        ({"pgd-20": 1, "apgd-t": 1}, False),
        ({"autoattack": 24}, True),
        ({"autoattack": 1}, False),
        ({"apgd-t": 1}, None),
    ],
)
def test_only_many_steps_up_the_same_loss_are_compared_with_a_single_one(others, passes):
    """A targeted attack leaves 11 of 32 images by its loss, not by its steps."""
    attacks = {"fgsm": entry(32)} | {name: entry(correct) for name, correct in others.items()}
    if "autoattack" in attacks:
        attacks["autoattack"] = entry(1, parts=[{"attack": "apgd-ce", "broken": 0, "correct": others["autoattack"]}])
    assert passed(attacks, "single-step")["passed"] is passes


def test_square_beating_the_gradient_is_named():
    """A network whose gradient is 0 everywhere hides from PGD and not from Square."""
    words = failed(Quantised(), grey(0.02, 0.06, 20), "pgd-3,square", eps=0.1)
    assert "square, which sees no gradients" in words["black-box"]


def entry(correct, total=100, **more):
    return {"accuracy": correct / total, "correct": correct, "total": total} | more


def passed(attacks, name, total=100, facts=None):
    return next(one for one in check(attacks, facts or {}, total) if one["check"] == name)


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("gradients", {"zero_gradient": 0, "right": 0}, ""),
        ("gradients", {"zero_gradient": 1, "right": 100}, ""),
        ("gradients", {"zero_gradient": 9, "right": 100}, ""),
        ("gradients", {"zero_gradient": 10, "right": 100}, "10 of 100 correct images"),
        ("gradients", {"zero_gradient": 1, "right": 10}, "1 of 10 correct images"),
        ("classifier", {"predicted_3": 94, "predicted_7": 6, "label_3": 50, "label_7": 50}, ""),
        ("classifier", {"predicted_3": 95, "predicted_7": 5, "label_3": 50, "label_7": 50}, "class 3 on 95 of 100"),
        ("classifier", {"predicted_3": 96, "predicted_7": 4, "label_3": 95, "label_7": 5}, ""),  # as the images are
        ("classifier", {"predicted_3": 100, "label_7": 100}, ""),  # images of one class
        ("classifier", {"probabilities": 99}, ""),
        ("classifier", {"probabilities": 100}, "probabilities, not logits"),
        ("classifier", {"saturated": 49}, ""),
        ("classifier", {"saturated": 50}, "saturated"),
    ],
)
def test_a_symptom_counts_from_its_share_of_the_images_on(name, facts, words):
    one = passed({}, name, facts=facts)
    assert one["passed"] is (words == "")
    assert words in one["words"]


@pytest.mark.parametrize(
    ("total", "broken", "passes"), [(1000, 10, True), (1000, 11, False), (50, 1, True), (50, 2, False)]
)
def test_one_image_in_a_hundred_may_be_square_s_luck(total, broken, passes):
    parts = [{"attack": "square", "broken": broken, "correct": 20}]
    assert passed({"autoattack": entry(20, total, parts=parts)}, "black-box", total)["passed"] is passes
    apart = {"pgd-20": entry(40, total), "apgd-ce": entry(30, total), "square": entry(30 - broken, total)}
    assert passed(apart, "black-box", total)["passed"] is passes


@pytest.mark.parametrize(("attacks", "passes"), [(("pgd-20",), None), (("square",), None), (("autoattack",), True)])
def test_square_is_compared_where_it_ran_beside_an_attack_by_the_gradient(attacks, passes):
    assert passed(dict.fromkeys(attacks, entry(40)), "black-box")["passed"] is passes


@pytest.mark.parametrize(
    ("single", "multi", "passes"), [(60, 31, True), (60, 30, False), (25, 6, True), (25, 4, False)]
)
def test_many_steps_must_be_stronger_by_a_fifth_and_by_half(single, multi, passes):
    one = passed({"fgsm": entry(single), "apgd-ce": entry(50), "pgd-20": entry(multi)}, "single-step")
    assert one["passed"] is passes
    assert passes or f"{single}.0% under FGSM and {multi}.0% under pgd-20" in one["words"]


def test_square_finding_what_the_others_left_is_named():
    parts = [{"attack": "apgd-ce", "broken": 20, "correct": 60}, {"attack": "square", "broken": 30, "correct": 30}]
    one = passed({"autoattack": entry(30, parts=parts)}, "black-box")
    assert one["passed"] is False
    assert "breaks 30 images" in one["words"]


def test_square_alone_doing_better_is_named():
    assert passed({"pgd-20": entry(60), "square": entry(40)}, "black-box")["passed"] is False
    assert passed({"pgd-20": entry(40), "square": entry(60)}, "black-box")["passed"] is True


@pytest.mark.parametrize("name", ["black-box", "single-step", "inside"])
def test_what_was_not_looked_at_does_not_pass(name):
    one = passed({"clean": entry(90)}, name)
    assert one["passed"] is None
    assert one["words"].startswith("not checked")
