"""Small work beside what a step waits for: nothing is read before it is there, nor given away while it is read."""

import contextlib

import pytest
import torch

from elle.engine.alongside import Alongside
from elle.engine.runtime import GraphedStep
from tests.gpu.test_cuda import DEVICE, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 8


class Late(Alongside):
    """As slow as no kernel is."""

    @contextlib.contextmanager
    def work(self, *read):
        with super().work(*read):
            torch.cuda._sleep(2_000_000)
            yield


class InARow(Alongside):
    def __init__(self, device):
        super().__init__(device)
        self.side = None


def trained(monkeypatch, kind, method, captured, **rest):
    """What the steps write down, and the weights in the end."""
    monkeypatch.setattr("elle.engine.step.Alongside", kind)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    step = make_step(method, "fp16", steps=STEPS, **rest)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    run = GraphedStep(step, 64, DEVICE) if captured else step
    for k in range(STEPS):
        run(torch.arange(64 * k, 64 * k + 64, device=DEVICE))
    torch.cuda.synchronize()
    assert (int(step.position), int(step.done)) == (STEPS, STEPS)
    return step.records.nan_to_num(), [one.detach().clone() for one in step.model.parameters()]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("method", "rest"),
    [("fgsm", {}), ("free", {}), ("elle-a", {}), ("fgsm", {"accumulate": 2, "average": 0.9})],
    ids=str,
)
def test_a_step_is_that_of_one_stream_however_late_it_comes(monkeypatch, method, rest, captured):
    records, weights = trained(monkeypatch, InARow, method, captured, **rest)
    assert records[:, :2].isfinite().all()
    for kind in (Alongside, Late):
        found, moved = trained(monkeypatch, kind, method, captured, **rest)
        torch.testing.assert_close(found[:4], records[:4], rtol=0.02, atol=0.02)
        for here, there in zip(moved, weights, strict=True):
            assert (here - there).norm() <= 0.05 * there.norm() + 1e-3
