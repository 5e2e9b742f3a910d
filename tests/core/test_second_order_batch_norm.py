"""BatchNorm that is cheap to differentiate twice gives the values, derivatives and statistics of torch's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from elle.core.linearity import gradient_misalignment
from elle.core.second_order import twice_differentiable
from elle.models.registry import build_model
from tests.networks import gradient, relative_distance


def normalised(x, weight, bias, **settings):
    with twice_differentiable():
        return F.batch_norm(x, None, None, weight, bias, training=True, **settings)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(4, 3, 2, 3), (6, 3), (3, 2, 5)], ids=str)
def test_first_and_second_derivatives_are_right(shape):
    torch.manual_seed(0)
    inputs = doubles(*shape), doubles(shape[1]), doubles(shape[1])
    assert gradcheck(normalised, inputs)
    # A large eps, so that the mean square of xhat is far from 1.
    assert gradgradcheck(lambda *tensors: normalised(*tensors, eps=0.5), inputs)


def both_ways(model, work):
    """What `work` gives within and without, on two copies of the network, with their states afterwards."""
    within, without = copy.deepcopy(model), copy.deepcopy(model)
    with twice_differentiable():
        found = work(within)
    return (found, within), (work(without), without)


def test_the_running_statistics_are_torch_s():
    x = torch.randn(5, 3, 4, 4) * 3 + 1
    for momentum in (0.1, None):
        layer = nn.BatchNorm2d(3, momentum=momentum)
        (found, within), (expected, without) = both_ways(layer, lambda layer: [layer(x + k) for k in range(3)])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(within.state_dict(), without.state_dict(), rtol=0, atol=0)


def misalignment_gradient(model):
    torch.manual_seed(3)
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6)
    gradient_misalignment(model, x, y, 8 / 255, differentiable=True).mean().backward()
    return gradient(model)


def test_a_residual_network_has_the_same_second_order_gradient():
    torch.manual_seed(0)
    model = build_model("preact-resnet18", (3, 8, 8), 10).train()
    (found, within), (expected, without) = both_ways(model, misalignment_gradient)
    assert relative_distance(found, expected) < 1e-3
    torch.testing.assert_close(within.state_dict(), without.state_dict())


def second_gradients(dtype, x, g, v, weight):
    """Derivatives of <v, grad x> by g, x and the weight."""
    x, g = x.to(dtype).requires_grad_(), g.to(dtype).requires_grad_()
    weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    y = F.batch_norm(x, None, None, weight, torch.zeros_like(weight), training=True)
    (for_x,) = torch.autograd.grad(y, x, g, create_graph=True)
    return torch.autograd.grad(for_x, (g, x, weight), v.to(dtype))


def test_of_half_precision_values_it_is_nearer_the_exact_derivative_than_torch():
    torch.manual_seed(0)
    values = (*(torch.randn(8, 6, 7, 7).bfloat16() for _ in range(3)), torch.randn(6))
    torch_s, exact = (second_gradients(dtype, *values) for dtype in (torch.bfloat16, torch.float64))
    with twice_differentiable():
        found = second_gradients(torch.bfloat16, *values)
    for mine, other, expected in zip(found, torch_s, exact, strict=True):
        distance = relative_distance(mine.double(), expected)
        assert distance < min(0.003, relative_distance(other.double(), expected))


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(3).eval(), nn.BatchNorm2d(3, affine=False)],
    ids=["eval mode", "without weights"],
)
def test_what_it_does_not_know_is_left_to_torch(layer):
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    with twice_differentiable():
        assert type(layer(x).grad_fn).__name__ == "NativeBatchNormBackward0"
        assert type(nn.BatchNorm2d(3)(x).grad_fn).__name__ == "_BatchNormBackward"


def test_a_single_value_a_channel_is_refused_as_torch_does():
    with twice_differentiable(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.randn(1, 3))
