"""The original LLR: the point that is sought, and the gradient there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.core.linearity import input_gradient
from elle.core.losses import WorstGap
from elle.methods import METHODS
from tests.networks import gradient, smooth_net

from .watched import EPS, Watched, flat_images, flattened, image_losses, unflattened, when


def bent_net():
    """A smooth network whose loss is far from linear in a ball of 0.2."""
    network = smooth_net(seed=6)
    with torch.no_grad():
        network[1].weight *= 4
        network[3].weight *= 3
    return network


def gap(network, x, y, d):
    slope = input_gradient(network, x, y)
    there, here = (F.cross_entropy(network(points), y, reduction="none") for points in (x + d, x))
    return (there - here - (d * slope).sum(1)).abs().detach()


def test_the_worst_gap_is_above_those_of_random_points():
    eps, model = 0.2, Watched(bent_net())
    x, y = flat_images(16)
    torch.manual_seed(0)
    WorstGap(input_gradient)(model, x, y, x, eps, when())
    d = model.seen[-1].chunk(2)[1] - x
    assert d.abs().max() <= eps * (1 + 1e-5)
    found = gap(model.network, x, y, d)
    random = torch.stack([gap(model.network, x, y, (2 * torch.rand_like(x) - 1) * eps) for _ in range(200)])
    assert (found > random.mean(0)).all()
    assert found.mean() > random.max(0).values.mean()


def test_more_steps_find_a_larger_gap():
    eps, means = 0.2, []
    x, y = flat_images(16)
    for steps in (1, 20):
        model = Watched(bent_net())
        torch.manual_seed(0)
        WorstGap(input_gradient, steps=steps, rate=0.02)(model, x, y, x, eps, when())
        means.append(gap(model.network, x, y, model.seen[-1].chunk(2)[1] - x).mean())
    assert means[0] < means[1]


def test_the_weights_of_the_original_llr_are_its_authors():
    """2 CE + 4 (gap + 0.3 |slope|) in their code for CIFAR-10: the slope's 0.3 is inside the regulariser's 4."""
    loss = METHODS["llr-original"].loss
    assert (loss.nominal, loss.weight, loss.weight * loss.slope) == (2.0, 4.0, pytest.approx(1.2))


def test_the_worst_gap_is_sought_inside_the_pixel_range():
    model, (x, y) = Watched(smooth_net(seed=6)), flat_images(16)
    x = x.round()
    WorstGap(input_gradient)(model, x, y, x, EPS, when())
    searched = model.seen[2:]
    assert all(points.min() >= 0 and points.max() <= 1 for points in searched)
    assert all((points - x).abs().max() <= EPS * (1 + 1e-5) for points in searched[:-1])
    assert (searched[-2] != x).any()


def test_the_gradient_of_the_original_llr_agrees_with_differences_at_a_frozen_point():
    eps, model = 0.2, Watched(bent_net().double())
    x, y = flat_images(8)
    x = x.double()
    loss, logits = WorstGap(input_gradient, nominal=1.5, weight=2.0, slope=0.7)(model, x, y, x, eps, when())
    loss.backward()
    network = model.network
    d = model.seen[-1].chunk(2)[1] - x

    def value(flat):
        parameters = unflattened(network, flat)
        here, there = (image_losses(network, parameters, points, y) for points in (x, x + d))
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(image_losses(network, parameters, leaf, y).sum(), leaf)
        linear = (d * slope).sum(1)
        return float((1.5 * here + 2.0 * ((there - here - linear).abs() + 0.7 * linear.abs())).mean())

    at = flattened(network)
    assert loss.item() == pytest.approx(value(at), rel=1e-5)
    torch.testing.assert_close(logits, network(x).float())
    found = gradient(network)
    for seed in range(5):
        direction = torch.randn(len(at), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        slope = (value(at + 1e-6 * direction) - value(at - 1e-6 * direction)) / 2e-6
        assert float(found @ direction) == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_a_gradient_that_is_no_number_does_not_move_the_worst_gap():
    """As half precision may have it: the points it is sought at stay finite, and so does the loss."""

    class NoGradientAtZero(nn.Module):
        def forward(self, x):
            return network(x + 0 * (x - x.detach()).abs().sqrt() * (x == 0))

    network, (x, y) = smooth_net(), flat_images()
    x[:, ::3] = 0
    model = Watched(NoGradientAtZero())
    (slope,) = torch.autograd.grad(model(leaf := x.clone().requires_grad_()).sum(), leaf)
    assert slope.isnan().any()
    value, _ = WorstGap(lambda model, x, y, differentiable: torch.zeros_like(x))(model, x, y, x, EPS, when())
    assert value.isfinite()
    assert all(points.isfinite().all() for points in model.seen)
