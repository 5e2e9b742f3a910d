"""PGD in slots finds what restarts one after the other find, and believes float32 alone."""

import pytest
import torch
from torch import nn

from elle.core.attacks import SignStep
from elle.evaluation import pgd
from elle.evaluation.mode import evaluation_mode
from tests.networks import conv_net, images, trained

EPS = 0.1
PGD = SignStep(alpha=0.25, steps=10, noise=1, clip=True)


@pytest.fixture(scope="module")
def model():
    return trained(conv_net(), *images(64), steps=15, lr=0.05).eval()


@pytest.fixture(scope="module")
def data(model):
    """Correctly classified images."""
    x, y = images(80, seed=1)
    right = model(x).argmax(1) == y
    return x[right], y[right]


def run(model, data, restarts=2, attack=PGD, seed=0, **settings):
    with evaluation_mode(model, seed, torch.device("cpu")):
        return pgd.search(attack, model, *data, EPS, norm=attack.norm, restarts=restarts, **settings)


def broken(points, x):
    return (points != x).flatten(1).any(1)


def test_what_is_found_is_wrong_and_inside_and_the_rest_untouched(model, data):
    points = run(model, data)
    found = broken(points, data[0])
    assert 0 < found.sum() < len(found), "everything or nothing is broken: the test shows nothing"
    assert torch.equal(model(points).argmax(1) != data[1], found)
    assert (points - data[0]).abs().max() <= EPS + 1e-6
    assert points.min() >= 0
    assert points.max() <= 1


@pytest.mark.parametrize(("alpha", "steps", "restarts"), [(0.25, 1, 1), (0.25, 10, 1), (0.25, 3, 8), (2, 10, 1)])
def test_what_is_found_are_the_points_after_all_the_steps_of_the_first_restart_that_breaks(
    model, data, alpha, steps, restarts
):
    """A step more or less, an earlier point of the way, or a start drawn twice is another attack than its name says."""
    x, y = data
    found, wrong, passed, first = x.clone(), torch.zeros(len(x), dtype=torch.bool), [], 0
    torch.manual_seed(0)
    for restart in range(restarts):
        last = (x + (2 * torch.rand(x.shape) - 1) * EPS).clamp(0, 1)
        for _ in range(steps):
            passed.append(model(last).argmax(1) != y)
            leaf = last.requires_grad_()
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(leaf), y), leaf)
            last = (leaf.detach() + alpha * EPS * slope.sign()).clamp(x - EPS, x + EPS).clamp(0, 1)
        new = (model(last).argmax(1) != y) & ~wrong
        found[new], wrong[new] = last[new], True
        first = first if restart else int(wrong.sum())
    assert 0 < first <= wrong.sum() < len(y)
    assert restarts == 1 or first < wrong.sum(), "no restart finds more than the first: the test shows nothing"
    # Steps of twice the radius jump to and fro: some images are broken on the way and not at its end.
    assert alpha < 1 or (torch.stack(passed).any(0) & ~wrong).any()
    attack = SignStep(alpha=alpha, steps=steps, noise=1, clip=True)
    points = run(model, data, restarts, attack=attack)
    assert torch.equal(broken(points, x), wrong)
    torch.testing.assert_close(points, found)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_the_batch_size_does_not_matter(model, data, batch):
    assert torch.equal(broken(run(model, data, batch=batch), data[0]), broken(run(model, data), data[0]))


def test_more_restarts_break_more(model, data):
    few, more = (broken(run(model, data, restarts), data[0]) for restarts in (1, 4))
    assert not (few & ~more).any()


class Fickle(nn.Module):
    """Right in float32, wrong in anything less."""

    def forward(self, x):
        sign = -1 if torch.is_autocast_enabled("cpu") else 1
        return sign * torch.stack([x.flatten(1).mean(1), torch.full((len(x),), -1.0)], 1)


def test_a_success_in_reduced_precision_alone_does_not_count():
    x, y = torch.rand(6, 1, 4, 4), torch.zeros(6, dtype=torch.long)
    model = Fickle()
    attack = SignStep(alpha=0.5, steps=2, noise=1, clip=True)
    assert broken(run(model, (x, y), attack=attack), x).sum() == 0
    assert broken(run(model, (x, y), attack=attack, precision="bf16"), x).sum() == 0
