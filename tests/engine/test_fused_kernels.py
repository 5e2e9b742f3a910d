"""The kernels of a step's small arithmetic give what torch's operations give."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.core.attacks import SignStep
from elle.engine import fused
from elle.engine.fused import by_kernels, takes_logits, takes_step
from elle.methods import configured
from elle.models import first_convolution, head
from elle.models.residual import PreActResNet
from tests.engine.steps import make_step, parameters, take
from tests.networks import relative_distance
from tests.triton_kernels import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
EPS = 8 / 255


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(fused, "_on_gpu", lambda x: True)


@pytest.fixture
def calls(monkeypatch):
    """Which of them have been used."""
    found = []

    def watch(name, work):
        def watched(*given, **named):
            found.append(name)
            return work(*given, **named)

        monkeypatch.setattr(fused, name, watched)

    for name in ("slope", "cross_entropy", "stepped"):
        watch(name, getattr(fused, name))
    return found


def fused_attack(attack):
    return by_kernels(dataclasses.replace(configured("fgsm"), attack=attack)).attack


def logits_and_labels(rows, classes, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(rows, classes, generator=generator)
    return logits.to(DEVICE, dtype), torch.randint(classes, (rows,), generator=generator).to(DEVICE)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(128, 10), (1, 2), (7, 100), (300, 10), (5, 1000), (9, 1)])
def test_the_cross_entropy_and_its_gradient_are_torch_s(rows, classes, dtype, smoothing):
    logits, y = logits_and_labels(rows, classes, dtype)
    logits.requires_grad_()
    expected, plain = (F.cross_entropy(logits.double(), y, label_smoothing=share) for share in (smoothing, 0.0))
    (gradient,) = torch.autograd.grad(expected, logits, torch.full_like(expected, 3.0))
    (uphill,) = torch.autograd.grad(plain, logits)
    assert takes_logits(logits, y)
    loss = fused.cross_entropy(logits, y, smoothing)
    summed = fused.slope(logits.detach(), y, 512.0)
    (found,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 3.0))
    assert loss.dtype is torch.float32
    assert found.dtype is summed.dtype is dtype
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(found, gradient, **rounding)
    torch.testing.assert_close(summed / (512 * rows), uphill, **rounding)


def test_smoothing_a_label_of_infinite_loss_is_infinite_as_torch_s():
    logits, y = logits_and_labels(4, 10, torch.float32)
    logits[1, (y[1] + 1) % 10] = -torch.inf
    assert fused.cross_entropy(logits, y, 0.1).isinf()
    assert F.cross_entropy(logits, y, label_smoothing=0.1).isinf()
    torch.testing.assert_close(fused.cross_entropy(logits, y), F.cross_entropy(logits, y))


def test_what_is_no_number_stays_none():
    logits, y = logits_and_labels(4, 10, torch.float32)
    logits[1, 2], logits[2, 3] = torch.nan, torch.inf
    found, loss = fused.slope(logits, y, 1.0), fused.cross_entropy(logits, y)
    assert found.isnan().any(1).tolist() == [False, True, True, False]
    assert loss.isnan()


@pytest.mark.parametrize(
    ("logits", "y"),
    [
        ((8, 10), torch.zeros(8, 10)),
        ((8, 10), torch.zeros(8, dtype=torch.int32)),
        ((8, 10, 2), torch.zeros(8, 2, dtype=torch.int64)),
        ((0, 10), torch.zeros(0, dtype=torch.int64)),
        ((4000, 10), torch.zeros(4000, dtype=torch.int64)),
    ],
    ids=["probabilities", "int32", "pixels", "none", "many"],
)
def test_other_logits_are_left_to_torch(logits, y):
    assert not takes_logits(torch.zeros(logits, device=DEVICE), y.to(DEVICE))


def test_arrays_that_lie_otherwise_are_left_to_torch():
    x, eps = torch.zeros(2, 3, 4, 4, device=DEVICE), torch.tensor(EPS, device=DEVICE)
    assert not takes_step(x, x.contiguous(memory_format=torch.channels_last), x, eps)
    assert not takes_step(x[..., ::2], x[..., ::2], x[..., ::2], eps)
    assert not takes_step(x.double(), x.double(), x.double(), eps)
    assert not takes_step(x, x, x, eps.expand(2, 1, 1, 1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.25, 2.5 / 7])
def test_a_step_of_an_attack_is_torch_s_to_the_last_bit(alpha, clip, project, layout):
    generator = torch.Generator().manual_seed(0)
    x, start, g = (torch.rand(3, 3, 11, 13, generator=generator) for _ in range(3))
    start, g = x + EPS * (3 * start - 1.5), g - 0.5
    g[0, 0, 0] = 0.0
    g[1, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan])
    x, start, g = (one.to(DEVICE, memory_format=layout) for one in (x, start, g))
    eps = torch.tensor(EPS, dtype=torch.float64, device=DEVICE)
    attack = SignStep(alpha=alpha, project=project, clip=clip)
    expected = attack.next_point(start, g, x, eps)
    found = fused_attack(attack).next_point(start, g, x, eps)
    assert found.stride() == x.stride()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("attack", "used"),
    [
        (SignStep(), ["slope", "stepped"]),
        (SignStep(noise=1, steps=2, alpha=0.5, clip=True), ["slope", "stepped"] * 2),
        (SignStep(zero=0.3), ["slope"]),
        (SignStep(agree=2, noise=1), ["slope"] * 2),
        (SignStep(norm="l2"), ["slope"]),
        (SignStep(frank_wolfe=True), ["slope"]),
        (SignStep(objective="kl", noise=1), ["stepped"]),
    ],
    ids=str,
)
def test_an_attack_finds_torch_s_points(attack, used, calls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 10)).to(DEVICE)
    x, y = torch.rand(4, 3, 4, 4, device=DEVICE), torch.arange(4, device=DEVICE)
    eps = torch.tensor(EPS, dtype=torch.float64, device=DEVICE)
    found = []
    for one in (attack, fused_attack(attack)):
        torch.manual_seed(1)
        found.append(one(model, x, y, eps))
    torch.testing.assert_close(found[1], found[0])
    assert calls == used


def test_a_loss_trains_as_torch_s(calls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 10)).to(DEVICE)
    x, y = torch.rand(4, 3, 4, 4, device=DEVICE), torch.arange(4, device=DEVICE)
    found = []
    for method in (configured("fgsm"), by_kernels(configured("fgsm"))):
        loss, logits = method.loss(model, x, y, x, EPS, None)
        found.append([loss, logits, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0])
    assert calls == ["cross_entropy"]


def test_a_gradient_that_is_no_number_moves_nothing():
    x, y = torch.rand(4, 3, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    eps = torch.tensor(EPS, dtype=torch.float64, device=DEVICE)
    attack = fused_attack(SignStep(project=False))
    assert torch.equal(attack(lambda x: x * torch.nan, x, y, eps), x)


def small_network():
    network = PreActResNet((1, 8, 8), 10, nn.ReLU, blocks=[1, 1], widths=(16, 32), stem_width=16)
    return network.to(memory_format=torch.channels_last)


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has whole steps of a GPU's own")
@pytest.mark.parametrize("method", ["fgsm", "pgd-2", "elle-a"])
def test_a_whole_step_with_all_kernels_trains_as_without(method, monkeypatch, calls):
    moved = []
    for wanted in (True, False):
        for module in (head, first_convolution):
            monkeypatch.setattr(module, "_on_gpu", lambda x, wanted=wanted: wanted)
        step = make_step(method, precision="fp16", network=small_network)
        monkeypatch.setattr(step, "_may_fuse", lambda wanted=wanted: wanted)
        start = parameters(step)
        take(step, 0)
        moved.append(torch.cat([(new - old).flatten() for new, old in zip(parameters(step), start, strict=True)]))
        assert step.records[0, :2].isfinite().all()
        assert {"slope", "stepped", "cross_entropy"} == set(calls)
    assert relative_distance(*moved) < 0.1
