"""The head of a network, the cross-entropy and an attack's step by kernels of our own, in whole steps."""

import pytest
import torch

from elle.engine import fused
from elle.engine.runtime import GraphedStep
from elle.engine.step import RECORDED
from elle.models import head
from tests.gpu.test_cuda import DEVICE, losses, make_step
from tests.gpu.waiting import without_waiting
from tests.networks import relative_distance

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KERNELS = {
    "logits_and_mean": head,
    "input_gradient": head,
    "slope": fused,
    "cross_entropy": fused,
    "stepped": fused,
}


@pytest.fixture
def calls(monkeypatch):
    """How often each was asked for."""
    found = dict.fromkeys(KERNELS, 0)

    def count(name, module):
        work = getattr(module, name)

        def counted(*given, **named):
            found[name] += 1
            return work(*given, **named)

        monkeypatch.setattr(module, name, counted)

    for name, module in KERNELS.items():
        count(name, module)
    return found


@pytest.mark.parametrize(
    ("method", "network", "times"),
    [
        ("fgsm", "preact-resnet18", (2, 2, 1, 1, 1)),
        ("fgsm", "resnet18", (2, 2, 1, 1, 1)),
        ("pgd-2", "preact-resnet18", (3, 3, 2, 1, 2)),
        ("elle", "preact-resnet18", (3, 3, 1, 1, 1)),
        ("gradalign", "preact-resnet18", (0, 0, 0, 0, 0)),
        ("fgsm", "small-cnn", (0, 0, 1, 1)),
    ],
)
def test_every_pass_of_a_step_has_them(method, network, times, calls):
    step, index = make_step(method, "fp16", network=network), torch.arange(64, device=DEVICE)
    step(index)
    assert tuple(calls.values())[: len(times)] == times


def test_they_are_not_used_where_they_may_not(calls):
    step, index = make_step("fgsm", "fp16", fused="off"), torch.arange(64, device=DEVICE)
    step(index)
    assert not any(calls.values())


def test_a_step_never_waits_for_the_device(calls):
    step, index = make_step("fgsm", "fp16"), torch.arange(64, device=DEVICE)
    step(index)
    with without_waiting():
        step(index)
    assert calls["logits_and_mean"] == 4


def leave_to_torch(monkeypatch):
    monkeypatch.setattr(head, "takes", lambda layer, x: False)
    monkeypatch.setattr(fused, "_usable", lambda x: False)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("method", ["fgsm", "n-fgsm"])
def test_a_step_trains_as_without(method, captured, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    rows = []
    for on in (True, False):
        if not on:
            leave_to_torch(monkeypatch)
        step = make_step(method, "fp16", steps=8)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE) if captured else step, 8)[:, RECORDED.index("loss")])
    assert rows[0].isfinite().all()
    torch.testing.assert_close(rows[0][:4], rows[1][:4], rtol=0.1, atol=1e-2)


def first_step(precision):
    """The loss and the error of a first step of ELLE, and how it moves the weights."""
    step = make_step("elle", precision)
    before = [one.detach().clone() for one in step.model.parameters()]
    step(torch.arange(64, device=DEVICE))
    moved = [(now.detach() - old).flatten() for now, old in zip(step.model.parameters(), before, strict=True)]
    assert step.scale is None or step.scale.overflow == 0
    return step.records[0, [RECORDED.index(name) for name in ("loss", "error")]], torch.cat(moved)


def test_a_penalised_step_is_as_near_to_the_exact_one_as_without(monkeypatch):
    """The first: a rounding grows a thousandfold within a few steps, as the penalty's weight is in the thousands."""
    found = first_step("fp16")
    leave_to_torch(monkeypatch)
    without, exact = first_step("fp16"), first_step("fp32")
    for records, _ in (found, without):
        torch.testing.assert_close(records, exact[0], rtol=0.1, atol=2e-6)
    distances = [relative_distance(moved, exact[1]) for _, moved in (found, without)]
    assert distances[0] < 1.1 * distances[1] < 1
