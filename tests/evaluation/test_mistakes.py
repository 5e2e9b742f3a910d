"""What a caller of `elle.evaluate` gets wrong is said in one line, and spoils nothing of theirs."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import elle
from elle.errors import InputError, WorkError
from tests.networks import images, smooth_net

EVALUATIONS = pytest.mark.parametrize("evaluation", [elle.evaluate, elle.assess])


@pytest.fixture
def model():
    return smooth_net(64)


@pytest.fixture
def data():
    return images(12)


class Within(nn.Module):
    """The network, with something done to its images and its answer."""

    def __init__(self, network, before=lambda x: x, after=lambda logits: logits):
        super().__init__()
        self.network, self.before, self.after = network, before, after

    def forward(self, x):
        return self.after(self.network(self.before(x)))


@EVALUATIONS
@pytest.mark.parametrize("attack", ["clean", "clean,fgsm"])
def test_a_network_that_writes_into_its_images_is_refused_and_they_stay_as_they_were(model, data, evaluation, attack):
    x, y = data
    kept = x.clone()
    with pytest.raises(InputError, match="writes into the images"):
        evaluation(Within(model, lambda x: x.sub_(0.5)), x, y, attack, 0.1)
    assert torch.equal(x, kept)


@EVALUATIONS
@pytest.mark.parametrize(
    ("network", "words"),
    [
        (lambda model: model.double(), "fails on float32 images .* dtype"),
        (lambda model: Within(model, lambda x: x.flatten(1)[:, :5]), "fails on float32 images .* shapes"),
        (lambda model: Within(model, after=lambda logits: logits[..., None]), r"gives \(12, 4, 1\) for 12 images"),
        (lambda model: Within(model, after=lambda logits: logits[:5]), r"gives \(5, 4\) for 12 images"),
        (lambda model: Within(model, after=lambda logits: (logits,)), "^the network returned a tuple"),
        (lambda model: model.forward, "the model is a method; give a torch.nn.Module"),
    ],
)
def test_a_network_that_does_not_answer_with_logits_is_refused(model, data, evaluation, network, words):
    with pytest.raises((InputError, WorkError), match=words):
        evaluation(network(model), *data, "clean,fgsm", 0.1)


@EVALUATIONS
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (lambda y: y - 1, "the labels are -1 to"),
        (lambda y: y + 3, "the network has 4 classes, 0 to 3"),
        (lambda y: y + 0.5, "not whole numbers"),
        (lambda y: y.tolist(), "y is a list; give a tensor or an array"),
    ],
)
def test_labels_that_are_none_are_refused(model, data, evaluation, labels, words):
    with pytest.raises(InputError, match=words):
        evaluation(model, data[0], labels(data[1]), "clean,fgsm", 0.1)


def test_whole_numbers_of_any_type_are_labels(model, data):
    x, y = data
    counts = [elle.evaluate(model, x, y.to(kind), "clean")["clean"]["correct"] for kind in (torch.int64, torch.float32)]
    assert counts[0] == counts[1] == elle.evaluate(model, x, y.int(), "clean")["clean"]["correct"]


@EVALUATIONS
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eps": "8/255"}, "eps is '8/255', a str; give a number"),
        ({"eps": torch.tensor(8.0)}, "eps is 8.0"),
        ({"engine": "slow"}, "engine 'slow' does not exist; use fast, reference"),
        ({"precision": "fp8"}, "precision 'fp8' does not exist"),
        ({"batch": 0}, "batch is 0"),
        ({"chunk": -1}, "chunk is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"attack": ["clean", "fgsm"]}, "attack is a list; write the names in one string"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(model, data, evaluation, settings, words):
    with pytest.raises(InputError, match=words):
        evaluation(model, *data, **settings)


def test_square_without_images_is_refused_before_any_attack(model, data):
    x, y = data
    with pytest.raises(InputError, match=r"square needs images \[N, C, H, W\]; these are \[12, 64\]"):
        elle.evaluate(model, x.flatten(1), y, "autoattack", 0.1)
    assert elle.evaluate(model, x.flatten(1), y, "apgd-ce", 0.1)["apgd-ce"]["total"] == 12


@pytest.mark.parametrize("eps", [np.float32(0.1), torch.tensor(0.1)])
def test_a_radius_from_a_library_of_arrays_is_recorded_as_a_plain_number(model, data, eps):
    record = elle.assess(model, *data, "clean,fgsm", eps)
    assert json.loads(json.dumps(record))["eps"] == pytest.approx(0.1)


def test_inference_mode_around_an_evaluation_changes_nothing(model, data):
    attack = "clean,fgsm,pgd-3,apgd-ce"
    outside = elle.evaluate(model, *data, attack, 0.1)
    monitor = elle.CollapseMonitor(*data, eps=0.1)
    with torch.inference_mode():
        inside = elle.evaluate(model, data[0] * 1, data[1] * 1, attack, 0.1)
        verdict = monitor.check(model, 1)
    assert verdict is None
    assert [one["correct"] for one in inside.values()] == [one["correct"] for one in outside.values()]
    assert outside["apgd-ce"]["correct"] < outside["clean"]["correct"]
