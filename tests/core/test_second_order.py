"""Convolutions that are cheap to differentiate twice give the values of torch's own."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from elle.core.second_order import twice_differentiable
from tests.networks import conv_net, images


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1}, {"dilation": (2, 1), "groups": 2}], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_first_and_second_derivatives_are_right(settings, with_bias):
    torch.manual_seed(0)
    x, weight = double(2, 4, 6, 5), double(4, 4 // settings.get("groups", 1), 3, 2)
    inputs = (x, weight, double(4)) if with_bias else (x, weight)

    def convolve(*tensors):
        with twice_differentiable():
            return nn.functional.conv2d(*tensors, **settings)

    torch.testing.assert_close(convolve(*inputs), nn.functional.conv2d(*inputs, **settings))
    assert gradcheck(convolve, inputs)
    assert gradgradcheck(convolve, inputs)


def penalty_gradient(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True)


def test_a_network_has_the_same_penalty_gradient_within_and_without():
    model = conv_net().double()
    x, y = images(8)
    x = x.double().requires_grad_()
    expected = penalty_gradient(model, x, y)
    with twice_differentiable():
        found = penalty_gradient(model, x, y)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class CountedGradients(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            self.masks.append(args[-1])
        return function(*args, **(kwargs or {}))


def test_the_gradient_of_the_images_alone_computes_no_weight_gradient():
    layer, x = nn.Conv2d(1, 2, 3), torch.rand(1, 1, 5, 5, requires_grad=True)
    with twice_differentiable(), CountedGradients() as counted:
        loss = layer(x).square().sum()
        torch.autograd.grad(loss, x, create_graph=True)
    assert counted.masks == [[True, False, False]]
    with counted:
        torch.autograd.grad(loss, layer.weight, retain_graph=True)
    assert counted.masks[1:] == [[False, True, False]]
    with counted:
        loss.backward()
    assert sorted(counted.masks[2:]) == [[False, True, False], [True, False, False]]


def test_it_replaces_convolutions_within_only():
    layer, x = nn.Conv2d(1, 2, 3), torch.rand(1, 1, 5, 5)
    with twice_differentiable():
        within = layer(x)
    assert type(within.grad_fn).__name__ == "AddBackward0"  # the bias, after a convolution of our own
    assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"


def test_what_it_does_not_know_is_left_to_torch():
    layer, x = nn.Conv2d(1, 2, 3, padding="same"), torch.rand(1, 1, 5, 5)
    with twice_differentiable():
        torch.testing.assert_close(layer(x), layer(x))
        assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
