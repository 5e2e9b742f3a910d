"""A network's first convolution by kernels of our own, in whole steps: they train as without, captured or not."""

import pytest
import torch
import torch.nn.functional as F

from elle.engine.runtime import GraphedStep
from elle.engine.step import RECORDED
from elle.models import first_convolution
from elle.models.first_convolution import convolved, input_gradient, weight_gradient
from tests.gpu.test_cuda import DEVICE, losses, make_step
from tests.gpu.waiting import without_waiting
from tests.networks import relative_distance

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BATCH = (128, 3, 32, 32)


def drawn():
    """Images, weights, the gradient of the result."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (BATCH, (64, 3, 3, 3), (128, 64, 32, 32))
    x, weight, g = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    x, weight, g = (one.contiguous(memory_format=torch.channels_last) for one in (x, weight / 5, g))
    return x, weight.half(), g.half()


def exact(x, weight, g):
    x, weight = x.half().double().requires_grad_(), weight.double().requires_grad_()
    y = F.conv2d(x, weight, padding=1)
    return y.detach(), *torch.autograd.grad(y, [x, weight], g.double())


def found_by_kernels(x, weight, g):
    return convolved(x, weight), input_gradient(g, x, weight), weight_gradient(g, x, weight)


def compare(found, expected):
    for mine, theirs, rounding in zip(found, expected, (5e-4, 1e-5, 5e-4), strict=True):
        assert relative_distance(mine.double(), theirs) < rounding


@pytest.fixture
def calls(monkeypatch):
    """How often either kernel was asked for."""
    found = {"convolved": 0, "input_gradient": 0, "weight_gradient": 0}

    def count(name, work):
        def counted(*given):
            found[name] += 1
            return work(*given)

        monkeypatch.setattr(first_convolution, name, counted)

    for name in found:
        count(name, getattr(first_convolution, name))
    return found


def test_of_a_whole_batch_values_and_gradients_are_torch_s():
    x, weight, g = drawn()
    compare(found_by_kernels(x, weight, g), exact(x, weight, g))


def test_a_graph_on_another_stream_holds_them():
    x, weight, g = drawn()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found_by_kernels(x, weight, g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = found_by_kernels(x, weight, g)
    for one in (x, weight, g):
        one.mul_(0.5).add_(0.1)
    graph.replay()
    compare(found, exact(x, weight, g))


@pytest.mark.parametrize(("method", "times"), [("fgsm", (2, 1, 1)), ("elle", (3, 1, 2))])
def test_every_pass_of_a_step_has_them(method, times, calls):
    step, index = make_step(method, "fp16"), torch.arange(64, device=DEVICE)
    step(index)
    assert tuple(calls.values()) == times


def test_a_step_never_waits_for_the_device(calls):
    step, index = make_step("fgsm", "fp16"), torch.arange(64, device=DEVICE)
    step(index)
    with without_waiting():
        step(index)
    assert calls["convolved"] == 4


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_trains_as_without(captured, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    rows = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(first_convolution, "suits", lambda layer: False)
        step = make_step("fgsm", "fp16", steps=8)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE) if captured else step, 8)[:, RECORDED.index("loss")])
    assert rows[0].isfinite().all()
    torch.testing.assert_close(rows[0][:4], rows[1][:4], rtol=0.1, atol=1e-2)
