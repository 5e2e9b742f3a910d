"""Weight gradients on a stream of their own: nothing is read before it is there, nor given away while it is read."""

import pytest
import torch
from torch import nn

from elle.engine.runtime import GraphedStep
from elle.models import weight_gradients
from elle.models.half_weights import half_weights
from tests.gpu.test_cuda import DEVICE, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def trained(method, steps=8, **rest):
    step = make_step(method, "fp16", steps=steps, **rest)
    run = GraphedStep(step, 64, DEVICE)
    for k in range(steps):
        run(torch.arange(64 * k, 64 * k + 64, device=DEVICE))
    assert step.records.isfinite().any()
    return [one.detach().clone() for one in step.model.parameters()], step.records[:, 0].clone()


def late(g, x, weight, settings, of):
    """As slow as no kernel is, where it is done beside."""
    if of == 1:
        torch.cuda._sleep(2_000_000)
    return gradient(g, x, weight, settings, of)


gradient = weight_gradients._gradient


@pytest.mark.parametrize("method", ["fgsm", "elle-a", "trades-single"])
def test_they_are_those_of_one_stream_however_late_they_come(monkeypatch, method):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        beside, beside_losses = trained(method)
        monkeypatch.setattr(weight_gradients, "_gradient", late)
        later, later_losses = trained(method)
        monkeypatch.setattr(weight_gradients, "_gradient", gradient)
        monkeypatch.setattr(weight_gradients, "side_stream", lambda device: None)
        alone, alone_losses = trained(method)
    finally:
        torch.use_deterministic_algorithms(False)
    for losses in (beside_losses, later_losses):
        torch.testing.assert_close(losses, alone_losses, rtol=0.02, atol=0.02)
    for weights in (beside, later):
        for here, there in zip(weights, alone, strict=True):
            assert (here - there).norm() <= 0.05 * there.norm() + 1e-3


def test_a_weight_used_elsewhere_as_well_has_both_gradients(monkeypatch):
    """Nothing is added to a gradient that is still to be computed."""
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(DEVICE, memory_format=torch.channels_last)
    x = torch.randn(8, 16, 8, 8, device=DEVICE).half().contiguous(memory_format=torch.channels_last)

    def found():
        layer.weight.grad = None
        with half_weights(layer):
            y = layer(x)
            (y.float().square().sum() + nn.functional.conv_transpose2d(y, layer.weight).float().sum()).backward()
        return layer.weight.grad

    monkeypatch.setattr(weight_gradients, "_gradient", late)
    beside = found()
    monkeypatch.setattr(weight_gradients, "side_stream", lambda device: None)
    torch.testing.assert_close(beside, found(), rtol=1e-2, atol=1e-2)
