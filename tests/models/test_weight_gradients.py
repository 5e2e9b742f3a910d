"""Convolutions whose weight gradients are computed beside the backward pass; on a CPU, one after the other."""

import pytest
import torch
from torch import nn

from elle.models.weight_gradients import Beside, suits


def gradients(layer, x, beside):
    x = x.clone().requires_grad_()
    forward = Beside(x.device).convolution(layer) if beside else layer._conv_forward
    weight = layer.weight
    y = forward(x, weight, None)
    return [y, *torch.autograd.grad(y.square().sum(), [x, weight])]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": (2, 0)},
        {"groups": 2, "stride": (1, 2)},
        {"kernel_size": 1, "stride": (3, 2)},
        {"kernel_size": 1, "stride": 2, "padding": 1, "groups": 2},
    ],
)
def test_gradients_are_torch_s(settings):
    layer, x = nn.Conv2d(4, 6, bias=False, **{"kernel_size": 3, **settings}), torch.randn(2, 4, 8, 7)
    for here, there in zip(gradients(layer, x, True), gradients(layer, x, False), strict=True):
        torch.testing.assert_close(here, there)


def strided(layer):
    layer.stride = 2  # torch takes a number as well
    return layer


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(3, 4, 3, bias=False), True),
        (nn.Conv2d(3, 4, 3), False),
        (nn.Conv2d(3, 4, 3, bias=False, padding="same"), False),
        (nn.Conv2d(3, 4, 3, bias=False, padding=1, padding_mode="reflect"), False),
        (nn.Conv1d(3, 4, 3, bias=False), False),
        (strided(nn.Conv2d(3, 4, 3, bias=False)), False),
        (type("Own", (nn.Conv2d,), {})(3, 4, 3, bias=False), False),
    ],
)
def test_layers_that_do_something_else_are_left_alone(layer, expected):
    assert suits(layer) is expected


@pytest.mark.parametrize(
    ("change", "call"),
    [
        (lambda x: x[0], lambda forward, x: forward(x)),
        (lambda x: x.unsqueeze(1), lambda forward, x: torch.func.vmap(forward)(x)),
    ],
    ids=["one image", "vmap"],
)
def test_what_only_torch_can_do_is_left_to_it(change, call):
    layer, x = nn.Conv2d(4, 6, 3, bias=False), change(torch.randn(2, 4, 8, 8))
    forward = Beside(x.device).convolution(layer)
    found = call(lambda x: forward(x, layer.weight, None), x)
    expected = call(layer, x)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), layer.weight)[0] for y in (found, expected)))
