"""Training losses in closed form, at the ends of their weights and in between."""

import math

import pytest
import torch
import torch.nn.functional as F

from elle.core.linearity import gradient_difference, gradient_misalignment, gradient_norm, taylor_gap
from elle.core.losses import CrossEntropy, Penalised, Trades, VertexMix
from tests.networks import Affine, smooth_net

EPS = 0.1


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = 0.3 + 0.4 * torch.rand(6, 12, generator=generator)
    return x, torch.arange(6) % 4, x + EPS * torch.randn(6, 12, generator=generator).sign()


def soft_cross_entropy(logits, target):
    return -(target * logits.log_softmax(1)).sum(1).mean()


def test_cross_entropy_is_taken_at_the_adversarial_points(data):
    model, (x, y, x_adv) = smooth_net(), data
    loss, logits = CrossEntropy()(model, x, y, x_adv, EPS)
    torch.testing.assert_close(logits, model(x_adv))
    torch.testing.assert_close(loss, F.cross_entropy(model(x_adv), y))


def test_a_smoothed_label_is_shared_among_all_classes(data):
    model, (x, y, x_adv) = smooth_net(), data
    loss, _ = CrossEntropy(smoothing=0.2)(model, x, y, x_adv, EPS)
    target = torch.full((6, 4), 0.05).scatter(1, y.unsqueeze(1), 0.85)
    torch.testing.assert_close(loss, soft_cross_entropy(model(x_adv), target))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(smoothing):
    with pytest.raises(ValueError, match="smoothing is"):
        CrossEntropy(smoothing=smoothing)


# AdvMixUp


def mixed(monkeypatch, loss, model, data, share):
    x, y, x_adv = data
    monkeypatch.setattr(torch, "rand", lambda *size, **kind: torch.as_tensor(share).expand(size).to(kind["dtype"]))
    return loss(model, x, y, x_adv, EPS)


def test_with_share_one_vertex_mixing_trains_on_the_image_and_its_label(monkeypatch, data):
    model, (x, y, _) = smooth_net(), data
    loss, logits = mixed(monkeypatch, VertexMix(), model, data, 1.0)
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(loss, F.cross_entropy(model(x), y))


def test_with_share_zero_vertex_mixing_trains_on_the_vertex_and_the_smoothed_label(monkeypatch, data):
    model, (x, y, x_adv) = smooth_net(), data
    loss, logits = mixed(monkeypatch, VertexMix(), model, data, 0.0)
    vertex = x + 2 * (x_adv - x)
    torch.testing.assert_close(logits, model(vertex))
    target = torch.full((6, 4), 0.3).scatter(1, y.unsqueeze(1), 0.1)
    torch.testing.assert_close(loss, soft_cross_entropy(model(vertex), target))


def test_between_the_ends_point_and_label_are_mixed_with_each_image_s_own_share(monkeypatch, data):
    model, (x, y, x_adv) = smooth_net(), data
    share = torch.linspace(0.1, 0.9, 6)
    loss, logits = mixed(monkeypatch, VertexMix(gamma=3.0, at_image=0.9, at_vertex=0.5), model, data, share)
    part = share.unsqueeze(1)
    torch.testing.assert_close(logits, model(part * x + (1 - part) * (x + 3 * (x_adv - x))))
    one_hot = F.one_hot(y, 4)
    at_image = one_hot * 0.9 + (1 - one_hot) * 0.1 / 3
    at_vertex = one_hot * 0.5 + (1 - one_hot) * 0.5 / 3
    torch.testing.assert_close(loss, soft_cross_entropy(logits, part * at_image + (1 - part) * at_vertex))


def test_the_share_is_drawn_for_each_image_and_step(data):
    """An affine model without curvature tells the share of each image from its logits."""
    model, (x, y, x_adv) = Affine(), data
    torch.manual_seed(0)
    shares = []
    for _ in range(200):
        _, logits = VertexMix()(model, x, y, x_adv, EPS)
        ends = model(x + 2 * (x_adv - x)), model(x)
        shares.append(((logits - ends[0]).sum(1) / (ends[1] - ends[0]).sum(1)).detach())
    shares = torch.stack(shares)
    assert (shares.mean(0) - 0.5).abs().max() < 0.08
    assert (shares.var(0) - 1 / 12).abs().max() < 0.03
    assert shares.unique().numel() > 1100


def test_the_vertex_stays_in_the_pixel_range(monkeypatch):
    model = smooth_net()
    x, y = torch.tensor([[0.0] * 6 + [1.0] * 6]), torch.tensor([1])
    x_adv = x + torch.tensor([[-0.1, 0.1] * 6])
    _, logits = mixed(monkeypatch, VertexMix(gamma=20.0), model, (x, y, x_adv), 0.0)
    torch.testing.assert_close(logits, model(torch.tensor([[0.0, 1.0] * 6])))


# TRADES and penalties


def test_trades_is_its_formula_and_without_beta_the_clean_cross_entropy(data):
    model, (x, y, x_adv) = smooth_net(), data
    x_adv = x + 20 * (x_adv - x)  # near x the divergence is the same in both directions
    clean, there = model(x).log_softmax(1), model(x_adv).log_softmax(1)
    divergence = (clean.exp() * (clean - there)).sum(1).mean()
    for beta in (0.0, 6.0):
        loss, logits = Trades(beta)(model, x, y, x_adv, EPS)
        torch.testing.assert_close(loss, F.cross_entropy(clean, y) + beta * divergence)
        torch.testing.assert_close(logits, model(x_adv))


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("penalty", [gradient_misalignment, taylor_gap, gradient_difference, gradient_norm])
def test_a_penalty_is_weighed_and_taken_in_the_ball_of_its_norm(data, penalty, norm):
    model, (x, y, x_adv) = smooth_net(), data
    torch.manual_seed(1)
    loss, _ = Penalised(penalty, 3.0, norm)(model, x, y, x_adv, EPS)
    torch.manual_seed(1)
    expected = F.cross_entropy(model(x_adv), y) + 3 * penalty(model, x, y, EPS, norm).mean()
    torch.testing.assert_close(loss, expected.float())


def test_an_image_without_a_penalty_adds_nothing(data):
    model, (x, y, x_adv) = smooth_net(), data

    def penalty(model, x, y, eps, norm, differentiable):
        return torch.tensor([1.0, math.nan, 2.0, math.nan, 0.0, 0.0])

    loss, _ = Penalised(penalty, 2.0)(model, x, y, x_adv, EPS)
    torch.testing.assert_close(loss, F.cross_entropy(model(x_adv), y) + 2 * 3 / 6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Trades(-1.0), "beta"),
        (lambda: Trades(math.inf), "beta"),
        (lambda: Penalised(taylor_gap, -1.0), "weight"),
        (lambda: Penalised(taylor_gap, math.nan), "weight"),
        (lambda: Penalised(taylor_gap, 1.0, "l1"), "norm"),
        (lambda: VertexMix(at_image=1.1), "at_image"),
        (lambda: VertexMix(at_vertex=-0.1), "at_vertex"),
    ],
)
def test_a_bad_setting_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} is "):
        make()
