"""Fast-BAT: the gradient that the points add to the loss."""

import pytest
import torch
import torch.nn.functional as F

from elle.core.linearity import input_gradient
from elle.core.losses import Bilevel
from tests.networks import gradient, relative_distance, smooth_net

from .watched import EPS, Watched, flat_images, flattened, image_losses, unflattened, when


def mixed_derivative(network, x, y):
    """d/dtheta of each image's input gradient, dense: [B, inputs, parameters]."""

    def slopes(flat):
        points = x.clone().requires_grad_()
        losses = image_losses(network, unflattened(network, flat), points, y)
        return torch.autograd.grad(losses.sum(), points, create_graph=True)[0]

    return torch.autograd.functional.jacobian(slopes, flattened(network))


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_the_gradient_of_the_bilevel_loss_is_the_dense_one(rate):
    weight, eps = 0.05, 0.1
    model = Watched(smooth_net(6, 3, seed=4).double())
    x, y = flat_images(5, 6)
    x, y = x.double(), y % 3
    torch.manual_seed(0)
    loss, _ = Bilevel(input_gradient, rate=rate, weight=weight)(model, x, y, x, eps, when())
    loss.backward()
    network, (_, before, after) = model.network, model.seen
    step = input_gradient(network, before, y)
    torch.testing.assert_close(after, x + (before + rate * step - x).clamp(-eps, eps))
    inside = ((before + rate * step - x).abs() < eps).double()
    assert 0.1 < inside.mean() < 1
    outer = input_gradient(network, after, y)
    implicit = torch.einsum("bip,bi->p", mixed_derivative(network, before, y), inside * outer) / weight / len(x)
    parameters = list(network.parameters())
    direct = torch.autograd.grad(F.cross_entropy(network(after), y), parameters)
    direct = torch.cat([part.flatten() for part in direct])
    assert relative_distance(direct, direct + implicit) > 0.05  # the term is large enough to be seen
    assert relative_distance(gradient(network), direct + implicit) < 1e-5


@pytest.mark.parametrize("clip", ["ball", "pixels"])
def test_a_point_on_the_edge_carries_no_implicit_gradient(clip):
    """With a step that leaves the ball, or [0, 1], in every coordinate only the direct gradient is left."""
    eps = 8 / 255
    model = Watched(smooth_net(seed=4))
    x, y = torch.rand(16, 12, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4
    if clip == "pixels":
        x, eps = x.round(), 0.9
    Bilevel(input_gradient, rate=1e6, weight=1e-3)(model, x, y, x, eps, when())[0].backward()
    found = gradient(model)
    model.zero_grad()
    F.cross_entropy(model(model.seen[-1]), y).backward()
    torch.testing.assert_close(found, gradient(model))


def test_the_value_of_the_bilevel_loss_is_the_cross_entropy():
    model = Watched(smooth_net())
    x, y = flat_images()
    loss, logits = Bilevel(input_gradient, weight=0.01)(model, x, y, x, EPS, when())
    torch.testing.assert_close(logits, model.network(model.seen[-1]))
    torch.testing.assert_close(loss, F.cross_entropy(logits, y))
