"""The shared pieces: projections, hyperplanes, the step plan, objectives, random numbers."""

import pytest
import torch
from pyautoattack.autopgd_base import L1_projection
from pyautoattack.fab_projections import projection_l1, projection_l2, projection_linf

from elle.evaluation.autoattack import noise
from elle.evaluation.autoattack.hyperplane import shortest_way
from elle.evaluation.autoattack.norms import inside, length, settled, unit
from elle.evaluation.autoattack.objectives import runners_up, targeted_dlr, violation
from elle.evaluation.autoattack.schedule import checkpoints, plan
from elle.evaluation.autoattack.slots import Slots, blank
from elle.evaluation.autoattack.windows import two_bumps, window_plan

from .conftest import size

NORMS = ("linf", "l2", "l1")
ORIGINAL = {"linf": projection_linf, "l2": projection_l2, "l1": projection_l1}
CPU = torch.device("cpu")


def some_points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 3, 4, 4, generator=generator)
    x[:, :, 0] = x[:, :, 0].round()  # some pixels at the box's edge
    return x, torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [0.01, 0.5, 5.0])
def test_a_projected_point_is_in_ball_and_box(norm, eps):
    x, delta = some_points()
    radius = torch.full((len(x), 1, 1, 1), eps)
    for x_adv in (inside(x + delta, x, radius, norm), settled(x + delta, x, eps, norm)):
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        assert size(x_adv - x, norm).max() <= eps + 1e-6


@pytest.mark.parametrize("norm", NORMS)
def test_a_point_far_outside_comes_to_the_edge_and_no_further(norm):
    x, delta = torch.full((40, 3, 4, 4), 0.5), 5 * some_points()[1]
    for x_adv in (inside(x + delta, x, torch.full((40, 1, 1, 1), 0.3), norm), settled(x + delta, x, 0.3, norm)):
        torch.testing.assert_close(
            size(x_adv - x, norm), torch.full((40,), 0.3, dtype=torch.float64), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("norm", NORMS)
def test_lengths_and_units_are_those_of_the_norm(norm):
    _, delta = some_points()
    for signed in (delta, -delta.abs()):
        torch.testing.assert_close(length(signed.double(), norm), size(signed, norm))
    direction = delta.double() / size(delta, norm).view(-1, 1, 1, 1)
    for scale in (1, 1e-30, 1e30):
        torch.testing.assert_close(unit(scale * delta, norm).double(), direction, rtol=1e-5, atol=1e-7)
    assert torch.equal(unit(0 * delta, norm), 0 * delta)


@pytest.mark.parametrize("norm", NORMS)
def test_a_point_that_is_inside_stays(norm):
    x, delta = some_points()
    near = (x + 0.001 * delta).clamp(0, 1)
    torch.testing.assert_close(inside(near, x, torch.full((len(x), 1, 1, 1), 1.0), norm), near)


@pytest.mark.parametrize("eps", [0.3, 2.0, 8.0])
def test_the_l1_projection_is_the_originals(eps):
    x, delta = some_points()
    expected = x + delta + L1_projection(x, delta, eps)
    found = inside(x + delta, x, torch.full((len(x), 1, 1, 1), eps), "l1")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("norm", "original"), ORIGINAL.items())
@pytest.mark.parametrize("far", [0.01, 0.3, 0.9, 1.2])
def test_the_way_to_a_hyperplane_is_the_originals(norm, original, far):
    """`far` is the share of the box's room that the way needs: 1.2 is out of reach."""
    x, slope = (part.flatten(1) for part in some_points())
    reach = torch.where(slope > 0, slope * (1 - x), -slope * x).sum(1)
    value = -far * reach
    way = shortest_way(x, slope, value, norm)
    offset = (slope * x).sum(1) - value
    torch.testing.assert_close(size(way, norm), size(original(x, slope, offset), norm), rtol=1e-4, atol=1e-5)
    assert (x + way).min() >= -1e-6
    assert (x + way).max() <= 1 + 1e-6
    torch.testing.assert_close((slope * way).sum(1), -value.clamp(min=-reach), rtol=1e-4, atol=1e-4)
    # The same plane described from its other side.
    assert torch.equal(shortest_way(x, -slope, -value, norm), way)


@pytest.mark.parametrize("norm", NORMS)
def test_a_tiny_slope_leads_the_same_way(norm):
    x, slope = (part.flatten(1) for part in some_points())
    value = torch.ones(len(x))
    torch.testing.assert_close(
        shortest_way(x, slope * 1e-25, value * 1e-25, norm), shortest_way(x, slope, value, norm), rtol=1e-4, atol=1e-5
    )


def test_apgd_checks_its_step_where_the_paper_says():
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert list(checkpoints(100).values()) == [22, 19, 16, 13, 10, 7, 6, 6]


@pytest.mark.parametrize(("norm", "questions"), [("linf", 101), ("l2", 101), ("l1", 103)])
def test_the_plan_of_100_steps(norm, questions):
    steps = plan(100, norm, CPU)
    assert steps.questions == questions
    assert int(steps.final.sum()) == (41 if norm == "l1" else 101)
    assert steps.radius[steps.fresh].tolist() == ([3.0, 2.0, 1.0] if norm == "l1" else [1.0])


def test_targeted_dlr_is_positive_beyond_the_boundary_and_ignores_scale():
    logits = torch.tensor([[3.0, 1.0, 0.0, -2.0], [1.0, 3.0, 0.0, -2.0]])
    y, target = torch.tensor([0, 0]), torch.tensor([1, 1])
    torch.testing.assert_close(targeted_dlr(logits, y, target), torch.tensor([-2 / 4, 2 / 4]))
    torch.testing.assert_close(targeted_dlr(7 * logits, y, target), targeted_dlr(logits, y, target))
    for classes in (2, 3):
        torch.testing.assert_close(targeted_dlr(logits[:, :classes], y, target), torch.tensor([-2.0, 2.0]))


def test_targets_are_the_likeliest_other_classes():
    logits = torch.tensor([[0.0, 5.0, 2.0, 3.0]])
    assert runners_up(logits, torch.tensor([1]), 3).tolist() == [[3, 2, 0]]
    assert violation(logits, torch.tensor([1])).item() == -2


def test_random_numbers_depend_on_seed_and_image_alone():
    index = torch.arange(200)
    numbers = noise.uniform(noise.keys(0, 0, index), (50,))
    torch.testing.assert_close(noise.uniform(noise.keys(0, 0, index[7:9]), (50,)), numbers[7:9])
    for seed, stream in ((1, 0), (0, 1)):
        other = noise.uniform(noise.keys(seed, stream, index), (50,))
        assert abs(torch.corrcoef(torch.stack((other.flatten(), numbers.flatten())))[0, 1]) < 0.04
    assert abs(numbers.mean() - 1 / 2) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.003
    normal = noise.normal(noise.keys(0, 0, index), (50,))
    assert abs(normal.mean()) < 0.04
    assert abs(normal.std() - 1) < 0.03
    assert set(noise.signs(noise.keys(0, 0, index), (3,)).unique().tolist()) == {-1.0, 1.0}


def test_windows_shrink_and_stay_on_the_image():
    windows = window_plan(5000, 3, (32, 32), "linf", 0, CPU)
    # 0.8 of 32 x 32 pixels, halved after 10, 50, 200, 500, 1000, 2000 and 4000 queries
    sides = [int(windows.side[query]) for query in (0, 11, 51, 201, 501, 1001, 2001, 4001)]
    assert sides == [29, 20, 14, 10, 7, 5, 4, 3]
    assert (windows.corner[:, :2] + windows.side.unsqueeze(1)).max() <= 32
    assert windows.corner.min() == 0


@pytest.mark.parametrize("side", [1, 2, 3, 6, 9])
def test_a_bump_has_norm_one(side):
    assert two_bumps(side, "l2").norm().item() == pytest.approx(1)
    assert two_bumps(side, "l1").abs().sum().item() == pytest.approx(1)


NOTED = {
    "beyond the boundary": ([0.0, 0.5], 0.0, True, 9, 0.5),
    "on it": ([0.5, 0.5], 0.0, True, 9, 0.0),
    "before it": ([0.5, 0.0], 0.0, True, 9, None),
    "before it by less than rounding hides": ([0.05, 0.0], 0.1, True, 9, -0.05),
    "before it by more than rounding hides": ([0.2, 0.0], 0.1, True, 9, None),
    "no number for one class": ([0.5, float("nan")], 0.0, True, 9, 0.0),
    "outside the ball": ([0.0, 0.5], 0.0, False, 9, None),
    "asked after the end": ([0.0, 0.5], 0.0, True, 0, None),
}


@pytest.mark.parametrize(("logits", "doubt", "allowed", "left", "excess"), NOTED.values(), ids=NOTED)
def test_a_point_is_remembered_that_may_be_misclassified(logits, doubt, allowed, left, excess):
    """What reduced precision cannot tell is kept to be looked at in float32; better points replace worse ones."""
    x, x_adv = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    slots = Slots(**blank(x, torch.zeros(1, dtype=torch.int64), x_adv, left))
    slots.note(torch.tensor([logits]), torch.tensor([allowed]), torch.tensor([doubt]))
    assert slots.excess.item() == pytest.approx(float("-inf") if excess is None else excess)
    assert torch.equal(slots.x_found, x if excess is None else x_adv)
    for other, better in ((0.4, False), (0.6, True)):
        if excess == 0.5:
            slots.x_adv = torch.full_like(x, other)
            slots.note(torch.tensor([[0.0, other]]), torch.tensor([True]), torch.tensor([doubt]))
            assert torch.equal(slots.x_found, slots.x_adv) is better
