"""A network's head by kernels gives what torch's operations give: logits and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from elle.models import head
from elle.models.half_weights import half_weights
from elle.models.head import of_mean
from tests.networks import relative_distance
from tests.triton_kernels import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(head, "_on_gpu", lambda x: True)


class Head(nn.Module):
    def __init__(self, channels, outputs, bias=True):
        super().__init__()
        self.linear = nn.Linear(channels, outputs, bias)

    def forward(self, x):
        logits = of_mean(self.linear, x)
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1)) if logits is None else logits


def drawn(shape, outputs, bias=True):
    torch.manual_seed(0)
    x = torch.randn(shape).half().to(DEVICE, memory_format=torch.channels_last)
    return Head(shape[1], outputs, bias).to(DEVICE), x


def answers(model, x, kernels):
    """The logits, and the gradients of x, weights and biases."""
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with half_weights(model, kernels=kernels):
        logits = model(x)
        (F.softmax(logits.float(), 1)[:, 0].sum() * 64).backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return [logits.detach(), x.grad, model.linear.weight.grad, model.linear.bias.grad]


@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((5, 512, 4, 4), 10), ((3, 48, 3, 5), 7), ((2, 640, 8, 8), 100), ((4, 16, 1, 1), 2), ((1, 2048, 7, 7), 128)],
    ids=str,
)
def test_logits_and_gradients_are_torch_s(shape, outputs):
    model, x = drawn(shape, outputs)
    expected, found = answers(model, x, kernels=False), answers(model, x, kernels=True)
    assert found[0].dtype is torch.float32
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    for here, there in zip(found, expected, strict=True):
        assert here.shape == there.shape
        assert relative_distance(here.double(), there.double()) < 2e-3


def test_logits_are_not_rounded():
    """A linearity error is a difference of nearly equal losses, in which rounding would be seen."""
    model, x = drawn((16, 512, 4, 4), 10)
    exact = F.linear(
        x.double().mean((2, 3)), model.linear.weight.half().double(), model.linear.bias.half().double()
    ).detach()
    rounded, found = (relative_distance(answers(model, x, kernels)[0].double(), exact) for kernels in (False, True))
    assert found < 1e-6 < 1e-4 < rounded


@pytest.mark.parametrize(
    ("change", "bias", "outputs"),
    [
        (lambda x: x.float(), True, 4),
        (lambda x: x.contiguous(), True, 4),
        (lambda x: x, False, 4),
        (lambda x: x, True, 200),
    ],
    ids=["float32", "channels first", "no bias", "many outputs"],
)
def test_what_the_kernels_are_not_for_is_left_to_torch(change, bias, outputs, monkeypatch):
    model, x = drawn((2, 8, 3, 3), outputs, bias)
    monkeypatch.setattr(head, "logits_and_mean", None)
    with half_weights(model), torch.autocast(DEVICE, torch.float16):
        assert model(change(x)).shape == (2, outputs)


def test_a_layer_that_someone_watches_is_called():
    model, x = drawn((2, 8, 3, 3), 4)
    seen = []
    model.linear.register_forward_hook(lambda module, given, answer: seen.append(given[0].shape))
    with half_weights(model):
        model(x)
    assert seen == [(2, 8)]


def test_a_compiler_is_shown_torch_s_operations(monkeypatch):
    model, x = drawn((2, 8, 3, 3), 4)
    monkeypatch.setattr(head, "logits_and_mean", None)
    torch._dynamo.reset()
    with half_weights(model):
        assert torch.compile(model, backend="eager")(x).shape == (2, 4)


def test_parameters_that_a_call_brings_along_are_used():
    model, x = drawn((2, 8, 3, 3), 4)
    zeros = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    with half_weights(model), torch.autocast(DEVICE, torch.float16):
        assert model(x).abs().sum() > 0
        assert functional_call(model, zeros, (x,)).abs().sum() == 0


def test_it_is_there_within_a_step_alone():
    model, x = drawn((2, 8, 3, 3), 4)
    with half_weights(model):
        assert "of_mean" in vars(model.linear)
    assert "of_mean" not in vars(model.linear)
    with half_weights(model, kernels=False):
        assert "of_mean" not in vars(model.linear)
        assert model(x).dtype is torch.float16
