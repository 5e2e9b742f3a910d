"""APGD takes the steps of its paper: beside one image at a time, written down from arXiv 2003.01690, section 3."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elle.evaluation.autoattack.apgd import APGD
from elle.evaluation.autoattack.oracle import Oracle
from tests.networks import smooth_net

from .conftest import size

EPS = {"linf": 0.2, "l2": 0.6}
STEPS = 40
CHECKS = [8, 15, 21, 26, 30, 33, 35, 37, 39]  # 0.22 of the steps, then each interval one shorter, but two at least


def data(count: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    x[:4] = x[:4].round()
    return x, torch.arange(count) % 4


def projected(point: Tensor, x: Tensor, norm: str) -> Tensor:
    delta = point - x
    if norm == "linf":
        return (x + delta.clip(-EPS[norm], EPS[norm])).clip(0, 1)
    return (x + delta * min(1, EPS[norm] / delta.norm())).clip(0, 1)


def climbed(objective, start: Tensor, x: Tensor, norm: str) -> float:
    """The best value found for one image."""

    def ask(point: Tensor) -> tuple[float, Tensor]:
        point = point.clone().requires_grad_()
        value = objective(point)
        return value.item(), torch.autograd.grad(value, point)[0]

    now = before = start
    value, gradient = ask(now)
    best = at_check = value
    x_best, gradient_best = now, gradient
    length, halved, last, rises, checked = 2 * EPS[norm], True, 0.0, 0, 0
    for step in range(1, STEPS + 1):
        share = 1 if step == 1 else 0.75
        direction = gradient.sign() if norm == "linf" else gradient / gradient.norm()
        ahead = projected(now + length * direction, x, norm)
        moved = projected(now + share * (ahead - now) + (1 - share) * (now - before), x, norm)
        before, now = now, moved
        value, gradient = ask(now)
        rises, last = rises + (value > last), value
        if value > best:
            best, x_best, gradient_best = value, now, gradient
        if step in CHECKS:
            halved = rises <= 0.75 * (step - checked) or (not halved and at_check >= best)
            at_check, rises, checked = best, 0, step
            if halved:
                length, now, gradient = length / 2, x_best, gradient_best
    return best


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("norm", EPS)
def test_the_steps_are_those_of_the_paper(norm, targeted):
    model, (x, y) = smooth_net(seed=2), data()
    with torch.no_grad():
        model[1].weight.mul_(4)  # curved enough for steps to be halved
    oracle = Oracle(model, x.device, "fp32")
    attack = APGD(oracle, x, y, EPS[norm], norm, seed=0, steps=STEPS, restarts=1, targets=2 if targeted else 0)
    with torch.no_grad():
        rows = attack.start(torch.arange(len(x)), torch.full((len(x),), int(targeted)))
        starts = rows.x_adv.clone()
        for _ in range(attack.questions):
            attack.step(rows)
        second = model(x).scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)[:, 1]

    def objective(point: Tensor, k: int) -> Tensor:
        logits = model(point[None])[0]
        if not targeted:
            return F.cross_entropy(logits[None], y[k : k + 1])
        ranked = logits.sort(descending=True).values
        return (logits[second[k]] - logits[y[k]]) / (ranked[0] - (ranked[2] + ranked[3]) / 2)

    for k in range(len(x)):
        value = climbed(lambda point, k=k: objective(point, k), starts[k], x[k], norm)
        assert rows.value_best[k].item() == pytest.approx(value, rel=1e-4)
        # Not the points: where a derivative is next to 0, rounding decides its sign.
        assert objective(rows.x_best[k], k).item() == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("norm", EPS)
def test_it_starts_on_the_ball_s_edge_and_in_the_box(norm):
    x, y = torch.full((40, 3, 2, 2), 0.5), torch.zeros(40, dtype=torch.int64)
    x[20:] = torch.rand(20, 3, 2, 2, generator=torch.Generator().manual_seed(0)).round()
    attack = APGD(Oracle(smooth_net(), x.device, "fp32"), x, y, EPS[norm], norm, seed=0, steps=5, restarts=1)
    starts = attack.start(torch.arange(40), torch.zeros(40, dtype=torch.int64)).x_adv
    torch.testing.assert_close(size(starts - x, norm)[:20], torch.full((20,), EPS[norm], dtype=torch.float64))
    assert starts.min() >= 0
    assert starts.max() <= 1
    assert size(starts - x, norm)[20:].min() > 0.1 * EPS[norm]
    assert abs(torch.sign(starts - x)[:20].mean()) < 0.3
