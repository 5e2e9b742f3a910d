"""On a linear classifier the distance to the boundary is |margin| / dual norm: every attack reaches it within 1 %."""

import pytest
import torch
from torch import Tensor

from elle.evaluation.autoattack import ORDER, Budget, reference, search
from elle.evaluation.evaluate import assess
from elle.evaluation.results import unpacked
from tests.networks import Affine

EPS = {"linf": 0.04, "l2": 0.2, "l1": 0.3}
SHAPE = (1, 6, 6)


def dual(weights: Tensor, norm: str) -> Tensor:
    size = weights.abs()
    return {"linf": size.sum(-1), "l2": size.square().sum(-1).sqrt(), "l1": size.amax(-1)}[norm]


def two_classes(norm: str, ratios: list[float]) -> tuple[Affine, Tensor, Tensor]:
    """A two-class model and one point for each ratio, that far from the boundary in units of eps, away from the box."""
    model = Affine(36, 2)
    with torch.no_grad():
        # Square's windows never reach the last row and column: they carry no weight here.
        model.weight.view(2, 6, 6)[:, -1] = 0
        model.weight.view(2, 6, 6)[:, :, -1] = 0
        slope = model.weight[0] - model.weight[1]
        model.bias.copy_(torch.tensor([0.0, 0.5 * slope.sum()]))
        margin = torch.tensor(ratios) * EPS[norm] * dual(slope, norm)
        x = 0.5 + margin.unsqueeze(1) * slope / slope.square().sum()
    return model, x.view(-1, *SHAPE), torch.zeros(len(ratios), dtype=torch.int64)


def broken(x: Tensor, x_adv: Tensor) -> list[bool]:
    return (x != x_adv).flatten(1).any(1).tolist()


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t"])
def test_a_gradient_attack_breaks_exactly_the_points_within_reach(name, norm):
    model, x, y = two_classes(norm, [0.3, 0.9, 0.98, 0.99, 1.001, 1.01, 1.5])
    x_adv = search(name, model, x, y, EPS[norm], norm=norm, classes=2, seed=0)
    assert broken(x, x_adv) == [True] * 4 + [False] * 3


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["fgsm", "pgd-10", "pgd-20", "pgd-50-2"])
def test_steps_up_the_gradient_break_exactly_the_points_within_reach(name, norm):
    model, x, y = two_classes(norm, [0.3, 0.9, 0.98, 0.99, 1.001, 1.01, 1.5])
    record = assess(model, x, y, name, EPS[norm], norm=norm)
    assert unpacked(record["attacks"][name]["survived"], len(x)).tolist() == [False] * 4 + [True] * 3


def test_square_breaks_exactly_the_points_within_reach_in_linf():
    model, x, y = two_classes("linf", [0.3, 0.9, 0.98, 0.99, 1.001, 1.01, 1.5])
    x_adv = search("square", model, x, y, EPS["linf"], classes=2, seed=0, budget=Budget(queries=1500))
    assert broken(x, x_adv) == [True] * 4 + [False] * 3


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_square_reaches_as_far_as_the_original_in_the_other_norms(norm):
    """Its windows are at least three pixels wide there: no sum of bumps is the optimum, which for l1 is one pixel."""
    model, x, y = two_classes(norm, [0.3, 0.4, 0.5, 0.6, 0.7, 1.001])
    ours, theirs = (
        broken(x, engine("square", model, x, y, EPS[norm], norm=norm, classes=2, seed=0, budget=Budget(queries=400)))
        for engine in (search, reference.search)
    )
    assert ours[0]
    assert not ours[-1]
    assert abs(sum(ours) - sum(theirs)) <= 1


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ["apgd-t", "fab-t"])
def test_a_targeted_attack_finds_the_nearest_of_ten_classes(name, norm):
    model = Affine(36, 10, seed=1)
    x = 0.5 + 0.1 * torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(x)
        y = logits.argmax(1)
        margins = logits.gather(1, y.unsqueeze(1)) - logits
        slopes = model.weight[y].unsqueeze(1) - model.weight
        distance = (margins / dual(slopes, norm).clamp(min=1e-9)).scatter(1, y.unsqueeze(1), 9.0).amin(1)
    eps = float(distance.quantile(0.6))
    assert eps < 0.4  # so that the box does not matter
    far_off = (distance / eps - 1).abs() > 0.01
    budget = Budget(targets=9)  # the standard's five for l1 may miss the nearest
    found = torch.tensor(broken(x, search(name, model, x, y, eps, norm=norm, classes=10, seed=0, budget=budget)))
    assert torch.equal(found[far_off], (distance < eps)[far_off])
    assert far_off.sum() > 30


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ORDER)
def test_more_eps_breaks_more_points(name, norm):
    model, x, y = two_classes(norm, [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4])
    budget = Budget(queries=100, steps=20)
    counts = [
        sum(broken(x, search(name, model, x, y, share * EPS[norm], norm=norm, classes=2, seed=0, budget=budget)))
        for share in (0.3, 0.7, 1.3)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]
