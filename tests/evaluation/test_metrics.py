"""Linearity metrics over a set of images: their values, their summaries, and that they can be repeated."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch

from elle.core.attacks import fgsm, pgd
from elle.core.linearity import Linearity
from elle.errors import InputError, WorkError
from elle.evaluation import metrics
from elle.evaluation.metrics import METRICS, linearity_metrics, mean_error, parse_metrics, summary
from tests.networks import Affine, conv_net, images, smooth_net, trained

EPS = 8 / 255


@pytest.fixture(scope="module")
def data():
    return images(40, seed=1)


@pytest.fixture(scope="module")
def model():
    return trained(conv_net(), *images(64), steps=10, lr=0.05)


def test_a_constant_classifier_is_linear_and_its_misalignment_undefined(data):
    model = Affine(64)
    torch.nn.init.zeros_(model.weight)
    result = linearity_metrics(model, *data, EPS)
    assert result["error"]["mean"] == pytest.approx(0, abs=1e-12)
    assert result["error_abs"]["q95"] == pytest.approx(0, abs=1e-6)
    assert result["misalignment"] == {"count": 0, "undefined": 40}
    assert result["misalignment_fd"] == {"count": 0, "undefined": 40}


def test_a_binary_linear_classifier_is_aligned_but_its_loss_is_curved():
    x, y = images(40, classes=2)
    result = linearity_metrics(Affine(64, 2), x, y, EPS)
    assert result["misalignment"]["q95"] == pytest.approx(0, abs=1e-6)
    assert result["error"]["mean"] > 1e-9


def test_the_error_is_that_of_the_training_penalty(model, data):
    torch.manual_seed(5)
    model.eval()
    with torch.no_grad():
        error = Linearity()(model, *data, EPS).double()
    result = linearity_metrics(model, *data, EPS, seed=5)
    assert result["error"]["mean"] == pytest.approx(float(error.mean()), rel=1e-5)
    assert result["error_abs"]["mean"] == pytest.approx(float(error.sqrt().mean()), rel=1e-5)
    assert result["error"]["count"] == 40


def gaps(model, form, x, y, eps, adversarial=None):
    """The error of each image at the points that the metrics draw from seed 5."""
    torch.manual_seed(5)
    with torch.no_grad():
        return form(model.eval(), x, y, eps, adversarial=adversarial).double()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("error_smooth", Linearity(power="smooth-l1")),
        ("error_two", Linearity(samples=2)),
        ("error_half", Linearity(alpha=0.5)),
        ("error_max", Linearity(alpha="max")),
        ("error_5point", Linearity(form="5-point")),
        ("error_l2", Linearity(norm="l2")),
        ("error_l1", Linearity(norm="l1")),
        ("error_logits", Linearity(power=1, on="logits")),
        ("error_5point_logits", Linearity(form="5-point", power=1, on="logits")),
        ("error_l1_logits", Linearity(norm="l1", power=1, on="logits")),
        ("error_two_logits", Linearity(samples=2, power=1, on="logits")),
    ],
)
def test_a_metric_is_its_form_of_the_error(model, data, name, form):
    found = linearity_metrics(model, *data, 0.3, metric=name, seed=5)[name]
    assert found["mean"] == pytest.approx(float(gaps(model, form, *data, 0.3).mean()), rel=1e-5)


def test_every_form_of_the_error_is_measured_on_the_loss_and_on_the_logits():
    forms = {name.removesuffix("_logits") for name in METRICS if name.startswith("error")}
    on_logits = {name.removesuffix("_logits") for name in METRICS if name.endswith("_logits")}
    assert forms - on_logits == {"error_abs", "error_smooth"}  # other powers of the same gap
    assert on_logits < forms


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_two_point_error_reaches_to_the_fgsm_point_of_its_norm(model, data, norm):
    x, y = data
    x_adv = fgsm(model.eval(), x, y, 0.3, norm=norm)
    with torch.no_grad():
        adversarial = x_adv, model(x_adv)
    expected = gaps(model, Linearity(form="2p", power=1, norm=norm), x, y, 0.3, adversarial)
    found = linearity_metrics(model, x, y, 0.3, metric="error_2p", norm=norm, seed=5)["error_2p"]
    assert found["mean"] == pytest.approx(float(expected.mean()), rel=1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_loss_ratio_is_the_single_step_loss_over_the_multi_step_loss(model, data, norm):
    x, y = data
    torch.manual_seed(5)
    single = fgsm(model.eval(), x, y, 0.3, clip=True, norm=norm)
    multi = pgd(model, x, y, 0.3, steps=20, norm=norm)
    with torch.no_grad():
        losses = [-model(points).double().log_softmax(1)[range(len(y)), y] for points in (single, multi)]
    found = linearity_metrics(model, x, y, 0.3, metric="loss_ratio", norm=norm, seed=5)["loss_ratio"]
    assert found["mean"] == pytest.approx(float((losses[0] / losses[1]).mean()), rel=1e-5)
    assert found["mean"] < 0.999  # the other way round it would be above 1


def test_what_steps_to_an_adversarial_point_is_left_out_in_l1_and_refused_by_name(model, data):
    result = linearity_metrics(model, *data, 1.0, norm="l1")
    assert set(METRICS) - set(result) == {"error_2p", "error_2p_logits", "cure", "loss_ratio"}
    with pytest.raises(InputError, match="metric cure steps to an adversarial point"):
        linearity_metrics(model, *data, 1.0, norm="l1", metric="error,cure")


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(model, data):
    first = linearity_metrics(model, *data, EPS, seed=3)
    torch.manual_seed(777)
    assert linearity_metrics(model, *data, EPS, seed=3) == first
    assert linearity_metrics(model, *data, EPS, seed=4) != first


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_larger_ball_is_less_linear(model, data, norm):
    means = [linearity_metrics(model, *data, eps, norm=norm)["error_abs"]["mean"] for eps in (0.01, 0.1)]
    assert 3 * means[0] < means[1]


def test_metrics_leave_no_trace_on_the_network_or_the_caller(model, data):
    model.train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    linearity_metrics(model, *data, EPS)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_metrics_work_under_no_grad(model, data):
    expected = linearity_metrics(model, *data, EPS)
    with torch.no_grad():
        assert linearity_metrics(model, *data, EPS) == expected


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_images_come_in_batches_and_all_are_counted(model, data, batch):
    result = linearity_metrics(model, *data, EPS, batch=batch)
    assert {name: entry["count"] for name, entry in result.items()} == dict.fromkeys(METRICS, 40)


class Watched(np.ndarray):
    """An array that notes how many images are taken out of it at a time."""

    taken: ClassVar[list[int]] = []

    def __getitem__(self, part):
        found = super().__getitem__(part)
        self.taken.append(len(found))
        return found


@pytest.mark.parametrize("last", [False, True])
def test_an_array_of_bytes_is_measured_batch_by_batch_and_as_its_images_at_once(last):
    """`last`: the channels lie last in memory, as those of image files do, and random points are drawn in its order."""
    x, y = images(41, (3, 8, 8), seed=1)
    model = trained(conv_net(3), *images(64, (3, 8, 8)), steps=10, lr=0.05)
    pixels = (x * 255).byte().contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    expected = linearity_metrics(model, pixels / 255, y, EPS, batch=10)
    Watched.taken.clear()
    assert linearity_metrics(model, pixels.numpy().view(Watched), y.numpy(), EPS, batch=10) == expected
    assert Watched.taken == [10, 10, 10, 10, 1] * len(METRICS)


def test_the_mean_error_is_the_mean_of_the_training_penalty(data):
    model = smooth_net(64)
    torch.manual_seed(0)
    found = mean_error(model, *data, 1.0)
    torch.manual_seed(0)
    with torch.no_grad():
        assert found == pytest.approx(float(Linearity()(model, *data, 1.0).mean()))


@pytest.mark.parametrize("batch", [1, 7, 40, 100])
def test_the_mean_error_weighs_all_images_alike_whatever_the_batch(data, batch, monkeypatch):
    """With an error that is known for each image, a smaller last batch does not count for more."""
    monkeypatch.setitem(metrics.METRICS, "error", ("", lambda model, x, *_: x.flatten(1).mean(1)))
    assert mean_error(smooth_net(64), *data, EPS, batch=batch) == pytest.approx(float(data[0].mean()))


def test_a_summary_has_the_quantiles_of_its_values():
    result = summary(torch.arange(101, dtype=torch.float64).flip(0))
    assert result == {
        "count": 101,
        "undefined": 0,
        "mean": 50,
        "std": pytest.approx(math.sqrt(850)),
        "q05": 5,
        "q25": 25,
        "q50": 50,
        "q75": 75,
        "q95": 95,
    }


def test_a_summary_leaves_out_what_is_undefined():
    result = summary(torch.tensor([1.0, math.nan, 3.0, math.nan], dtype=torch.float64))
    assert (result["count"], result["undefined"], result["mean"], result["q50"]) == (2, 2, 2, 2)


@pytest.mark.parametrize("count", [0, 3])
def test_a_summary_of_nothing_defined_has_only_counts(count):
    assert summary(torch.full((count,), math.nan)) == {"count": 0, "undefined": count}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_the_same_alone_and_among_others(model, data, name):
    alone = linearity_metrics(model, *data, EPS, metric=name)
    assert math.isfinite(alone[name]["mean"])
    assert alone == {name: linearity_metrics(model, *data, EPS, metric=f"error,{name}")[name]}


def test_the_worst_alpha_gives_the_larger_error(model, data):
    result = linearity_metrics(model, *data, EPS, metric="error,error_max")
    assert result["error_max"]["mean"] > result["error"]["mean"]


@pytest.mark.parametrize(("names", "words"), [("eror", "did you mean 'error'"), ("", "no metric given")])
def test_unknown_metrics_are_refused(names, words):
    with pytest.raises(InputError, match=words):
        parse_metrics(names)
    assert parse_metrics("all") == list(METRICS)


def test_a_network_without_a_gradient_has_the_metrics_that_need_none(data):
    class Thresholded(Affine):
        def forward(self, x):
            return super().forward((x > 0.5).float())

    model = Thresholded(64)
    assert linearity_metrics(model, *data, EPS, metric="error")["error"]["count"] == 40
    with pytest.raises(WorkError, match="metric misalignment cannot be measured of this network"):
        linearity_metrics(model, *data, EPS, metric="misalignment")


def test_an_infinite_value_is_undefined_and_spoils_no_other():
    """A ratio to a loss of 0, or an error that overflows: a mean of inf and quantiles of NaN would say nothing."""
    result = summary(torch.tensor([1.0, math.inf, 3.0, math.nan]))
    assert (result["count"], result["undefined"], result["mean"], result["q50"]) == (2, 2, 2.0, 2.0)
    assert all(math.isfinite(value) for value in result.values())
