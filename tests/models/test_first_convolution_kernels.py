"""The kernels of a network's first convolution give what torch's operations give: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.models import first_convolution
from elle.models.first_convolution import Tiles, convolved, input_gradient, takes, weight_gradient
from elle.models.half_weights import half_weights
from tests.networks import relative_distance
from tests.triton_kernels import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
ROUNDING = {torch.float16: 5e-4, torch.float32: 1e-5}
SHAPES = [
    ((2, 3, 32, 32), 64),
    ((5, 3, 7, 8), 16),
    ((3, 1, 8, 7), 64),
    ((2, 4, 7, 7), 16),
    ((2, 2, 1, 1), 48),
    ((1, 3, 2, 100), 128),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(first_convolution, "_on_gpu", lambda x: True)


def images(shape, dtype=torch.float32, layout="contiguous"):
    """Of every layout the same images."""
    n, channels, height, width = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        inside = torch.full((n, channels + 1, height + 3, 2 * width), torch.nan, dtype=dtype, device=DEVICE)
        inside[:, 1:, 2:-1, ::2] = x
        x = inside[:, 1:, 2:-1, ::2]
    return x


def weights(channels, outputs, memory_format=torch.channels_last):
    weight = torch.randn(outputs, channels, 3, 3, generator=torch.Generator().manual_seed(1)) / 5
    return weight.to(DEVICE, torch.float16, memory_format=memory_format)


def gradients(shape, outputs):
    g = torch.randn(shape[0], outputs, *shape[2:], generator=torch.Generator().manual_seed(2))
    return g.to(DEVICE, torch.float16, memory_format=torch.channels_last)


def exact(x, weight, g):
    """torch's in double precision, of the images as they are rounded."""
    x, weight = x.half().double().requires_grad_(), weight.double().requires_grad_()
    y = F.conv2d(x, weight, padding=1)
    return y.detach(), *torch.autograd.grad(y, [x, weight], g.double())


def compare(x, weight, tiles=None):
    g = gradients(x.shape, len(weight))
    y, for_x = convolved(x, weight, tiles), input_gradient(g, x, weight, tiles)
    for_weight = weight_gradient(g, x, weight, tiles)
    assert for_weight.dtype is weight.dtype
    assert for_weight.stride() == weight.stride()
    assert y.dtype is torch.float16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert for_x.dtype is x.dtype
    for mine, theirs in zip((y, for_x, for_weight), exact(x, weight, g), strict=True):
        assert mine.shape == theirs.shape
        assert relative_distance(mine.double(), theirs) < ROUNDING[mine.dtype]


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "sliced"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
def test_values_and_gradients_are_torch_s(shape, outputs, dtype, layout):
    compare(images(shape, dtype, layout), weights(shape[1], outputs))


@pytest.mark.parametrize("tiles", [Tiles(16, 1), Tiles(64, 4), Tiles(256, 8)], ids=str)
def test_other_tiles_and_layouts_of_the_weights_give_the_same(tiles):
    compare(images((3, 3, 7, 9)), weights(3, 32, torch.contiguous_format), tiles)


def test_gradients_of_x_are_laid_out_as_x():
    x = images((2, 3, 8, 8), layout="channels last")
    assert input_gradient(gradients(x.shape, 16), x, weights(3, 16)).stride() == x.stride()


def test_a_gradient_of_another_layout_is_taken():
    x, weight, g = images((2, 3, 8, 8)), weights(3, 16), gradients((2, 3, 8, 8), 16)
    assert torch.equal(input_gradient(g.contiguous(), x, weight), input_gradient(g, x, weight))
    assert torch.equal(weight_gradient(g.contiguous(), x, weight), weight_gradient(g, x, weight))


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_gradients_of_weights_are_added_up_over_all_parts(parts, monkeypatch):
    monkeypatch.setattr(first_convolution, "PARTS", parts)
    compare(images((3, 3, 7, 9)), weights(3, 32), Tiles(16, 1))


def test_a_gradient_that_overflows_is_seen():
    x, weight, g = images((2, 3, 8, 8)), weights(3, 16), gradients((2, 3, 8, 8), 16)
    g[1, 5, 3, 3] = torch.inf
    assert (~weight_gradient(g, x, weight).isfinite()).flatten(1).all(1).tolist() == [k == 5 for k in range(16)]


def test_values_that_are_not_finite_stay_where_they_are():
    x, weight = images((2, 3, 8, 8)), weights(3, 16)
    x[0, 0, 0, 7] = torch.inf
    reached = ~convolved(x, weight).isfinite().all(1)
    assert reached.sum() == 4
    assert reached[0, :2, 6:].all()


def test_two_runs_are_bitwise_the_same():
    x, weight, g = images((3, 3, 9, 8)), weights(3, 64), gradients((3, 3, 9, 8), 64)
    assert torch.equal(convolved(x, weight), convolved(x, weight))
    assert torch.equal(input_gradient(g, x, weight), input_gradient(g, x, weight))
    assert torch.equal(weight_gradient(g, x, weight), weight_gradient(g, x, weight))


def layer(outputs=16):
    return nn.Conv2d(3, outputs, 3, padding=1, bias=False).to(DEVICE, torch.float16)


def test_other_images_and_weights_are_left_to_torch():
    conv, x = layer(), images((1, 3, 8, 8))
    assert takes(conv, x, conv.weight)
    for other in (x[0], x[:0], x.bfloat16(), x[:, :2], images((1, 3, 1, 129))):
        assert not takes(conv, other, conv.weight)
    assert not takes(conv, x, conv.weight.float())
    assert not takes(conv, x.expand(2**23, 3, 8, 8), conv.weight)


@pytest.mark.parametrize("asked", ["both", "weight"])
def test_in_a_step_the_gradients_are_those_without(asked, monkeypatch):
    conv, found, calls = nn.Conv2d(3, 32, 3, padding=1, bias=False).to(DEVICE), [], []
    monkeypatch.setattr(
        first_convolution, "weight_gradient", lambda *given: calls.append(None) or weight_gradient(*given)
    )
    # Of the parameter, not of the copy: what is found on a stream of its own does not pass through that.
    weight = conv.weight
    for on in (True, False):
        monkeypatch.setattr(first_convolution, "suits", lambda layer, on=on: on)
        x = images((4, 3, 8, 8), layout="channels last").requires_grad_(asked == "both")
        with half_weights(conv), torch.autocast(DEVICE, torch.float16):
            y = conv(x)
            loss = (y.float() ** 2).sum()
            with torch.autocast(DEVICE, enabled=False):
                found.append([y.detach(), *torch.autograd.grad(loss, [weight, x] if asked == "both" else [weight])])
        assert len(calls) == 1
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype is theirs.dtype
        assert relative_distance(mine.double(), theirs.double()) < 2e-3
