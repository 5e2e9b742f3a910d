"""GAT and NuAT: their distances, the attack that climbs them, and what weighs them."""

import pytest
import torch
import torch.nn.functional as F

from elle.core.attacks.network import in_eval_mode
from elle.core.losses import Guided, nuclear_norm
from tests.networks import conv_net, gradient, images, relative_distance, smooth_net

from .watched import EPS, Watched, flat_images, when


def orthogonal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)))[0]


def with_singular_values(*values, rows=9):
    count = len(values)
    return orthogonal(rows, count) @ torch.diag(torch.tensor(values)) @ orthogonal(count, count)


MATRICES = {
    "tall": torch.randn(32, 10, generator=torch.Generator().manual_seed(0)),
    "wide": torch.randn(4, 10, generator=torch.Generator().manual_seed(0)),
    "square": with_singular_values(3.0, 2.0, 1.0, rows=3),
    "one image": torch.randn(1, 10, generator=torch.Generator().manual_seed(0)),
    "large": 1e12 * with_singular_values(3.0, 2.0, 1.0),
    "small": 1e-30 * with_singular_values(3.0, 2.0, 1.0),
    "repeated": 5 * orthogonal(9, 4),
    "repeated and wide": 5 * orthogonal(9, 4).mT,
    "identity": torch.eye(5),
    "rank one": torch.ones(8, 5),
    "negative": -torch.ones(8, 5),
    "rank two": with_singular_values(2.0, 1.0, 0.0, 0.0),
    "spread": with_singular_values(1.0, 1e-2, 1e-4),
    "zero": torch.zeros(6, 4),
}
FULL_RANK = ["tall", "wide", "square", "one image", "large", "small", "repeated", "repeated and wide", "identity"]


@pytest.mark.parametrize("name", MATRICES)
def test_the_nuclear_norm_is_the_sum_of_the_singular_values(name):
    matrix = MATRICES[name]
    expected = float(torch.linalg.matrix_norm(matrix.double(), ord="nuc"))
    assert float(nuclear_norm(matrix)) == pytest.approx(expected, rel=1e-4, abs=0)


@pytest.mark.parametrize("name", MATRICES)
def test_the_gradient_of_the_nuclear_norm_is_a_subgradient(name):
    """G has no singular value above 1, and <G, M> is the norm itself."""
    matrix = MATRICES[name].clone().requires_grad_()
    nuclear_norm(matrix).backward()
    assert matrix.grad.isfinite().all()
    assert torch.linalg.matrix_norm(matrix.grad, ord=2) <= 1 + 1e-4
    expected = float(torch.linalg.matrix_norm(MATRICES[name].double(), ord="nuc"))
    assert float((matrix.grad * MATRICES[name]).sum()) == pytest.approx(expected, rel=1e-4, abs=0)


@pytest.mark.parametrize("name", FULL_RANK)
def test_the_gradient_of_the_nuclear_norm_is_the_polar_factor(name):
    matrix = MATRICES[name].clone().requires_grad_()
    nuclear_norm(matrix).backward()
    u, _, v = torch.linalg.svd(MATRICES[name].double() / MATRICES[name].abs().max().double(), full_matrices=False)
    torch.testing.assert_close(matrix.grad.double(), u @ v, rtol=0, atol=1e-4)


GUIDED = {
    "gat": Guided(in_eval_mode),
    "gat-original": Guided(in_eval_mode, start=0.5, clean=True, alternate=True, late=4.0),
    "nuat": Guided(in_eval_mode, "nuclear", 4.5, start=0.5, clean=True, alternate=True, ramp=True),
}


def distance(loss, here, there):
    if loss.distance == "nuclear":
        return torch.linalg.matrix_norm(here - there, ord="nuc") / len(here)
    return (here.softmax(1) - there.softmax(1)).square().sum(1).mean()


def guided_step(loss, model, x, y, corner, weight):
    """One sign step from the corner up CE + weight * distance, in the ball; and where the gradient is not tiny."""
    corner = corner.clone().requires_grad_()
    logits = model(corner)
    objective = F.cross_entropy(logits, y) + weight * distance(loss, model(x).detach(), logits)
    (slope,) = torch.autograd.grad(objective, corner)
    return x + (corner.detach() + EPS * slope.sign() - x).clamp(-EPS, EPS), slope.abs() > 1e-6


@pytest.mark.parametrize(
    ("name", "steps", "weight"),
    [
        ("gat", 0, 10.0),
        ("gat", 1, 10.0),
        ("gat-original", 0, 0.0),
        ("gat-original", 1, 10.0),
        ("gat-original", 2, 0.0),
        ("nuat", 2, 0.0),
        ("nuat", 3, 4.5),
    ],
)
def test_the_guided_attack_is_one_step_up_its_sum_at_the_steps_that_guide(name, steps, weight):
    loss, model = GUIDED[name], Watched(smooth_net(seed=2))
    x, y = flat_images(16)
    torch.manual_seed(3)
    loss(model, x, y, x, EPS, when(steps, 0.9 if loss.ramp else 0.5))
    _, corner, points, _ = model.seen
    torch.testing.assert_close((corner - x).abs(), torch.full_like(x, loss.start * EPS))
    expected, certain = guided_step(loss, model.network, x, y, corner, weight)
    torch.testing.assert_close(points[certain], expected[certain])
    other, sure = guided_step(loss, model.network, x, y, corner, 10.0 - weight)
    assert not torch.equal(other[certain & sure], expected[certain & sure])  # the weight does tell them apart


@pytest.mark.parametrize(
    ("name", "share", "weight"),
    [
        ("gat", 0.0, 10.0),
        ("gat", 0.95, 10.0),
        ("gat-original", 0.85, 10.0),
        ("gat-original", 0.87, 40.0),
        ("nuat", 0.0, 0.0),
        ("nuat", 0.45, 2.25),
        ("nuat", 0.9, 4.5),
        ("nuat", 1.0, 4.5),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_guided_loss_weighs_the_distance_by_the_share_of_the_training_done(name, share, weight, steps):
    loss, model = GUIDED[name], Watched(smooth_net(seed=2))
    x, y = flat_images(16)
    value, logits = loss(model, x, y, x, EPS, when(steps, share))
    here, there = model.network(x), model.network(model.seen[2])
    torch.testing.assert_close(logits, there)
    expected = F.cross_entropy(here if loss.clean else there, y) + weight * distance(loss, here, there)
    torch.testing.assert_close(value, expected)


def test_the_guided_points_are_inside_the_ball_and_the_pixel_range():
    x, y = images(16)
    x = x.round()
    for loss in GUIDED.values():
        model = Watched(conv_net())
        loss(model, x, y, x, EPS, when())
        assert (model.seen[2] - x).abs().max() <= EPS * (1 + 1e-5)
        assert all(points.min() >= 0 and points.max() <= 1 for points in model.seen)


def test_unprojected_the_guided_point_is_a_whole_step_from_its_corner():
    x, y = flat_images(16)
    model = Watched(smooth_net(seed=2))
    Guided(in_eval_mode, project=False)(model, x, y, x, EPS, when())
    _, corner, points, _ = model.seen
    torch.testing.assert_close((points - corner).abs(), torch.full_like(x, EPS), rtol=1e-4, atol=1e-6)
    assert (points - x).abs().max() == pytest.approx(2 * EPS, rel=1e-4)
    Guided(in_eval_mode, project=False)(model, x.round(), y, x, EPS, when())
    assert all(points.min() >= 0 and points.max() <= 1 for points in model.seen)


@pytest.mark.parametrize(("eval_mode", "seen"), [(True, 2), (False, 4)])
def test_the_guided_attack_moves_batchnorm_only_in_train_mode(eval_mode, seen):
    model, (x, y) = conv_net().train(), images(8)
    Guided(in_eval_mode, eval_mode=eval_mode)(model, x, y, x, EPS, when())
    assert int(model[1].num_batches_tracked) == seen
    assert all(module.training for module in model.modules())


def test_with_its_corner_the_guided_loss_gains_what_the_attack_maximised():
    """As where the attack's backward leaves its gradient in the parameters: also that of the prediction at x."""
    x, y = flat_images(16)
    found = []
    for corner in (False, True):
        model = Watched(smooth_net(seed=2).double())
        torch.manual_seed(3)
        Guided(in_eval_mode, corner=corner)(model, x.double(), y, x, EPS, when())[0].backward()
        found.append(gradient(model))
    at, network = model.seen[1], model.network
    network.zero_grad()
    (F.cross_entropy(network(at), y) + 10 * distance(GUIDED["gat"], network(x.double()), network(at))).backward()
    assert relative_distance(found[1] - found[0], gradient(network)) < 1e-5
    assert relative_distance(found[0], found[1]) > 0.1


@pytest.mark.parametrize(
    ("fields", "share", "factor"),
    [
        ({}, 0.99, 1),
        ({"late": 4.0}, 0.85, 1),
        ({"late": 4.0}, 0.86, 4),
        ({"late": 4.0}, 1.0, 4),
        ({"ramp": True}, 0.0, 0),
        ({"ramp": True}, 0.45, 0.5),
        ({"ramp": True}, 0.95, 1),
    ],
)
def test_the_weight_of_the_guide_is_what_the_share_of_the_training_makes_it(fields, share, factor):
    model, (x, y) = Watched(smooth_net()), flat_images()
    found, _ = Guided(in_eval_mode, weight=10.0, **fields)(model, x, y, x, 0.3, when(1, share))
    here, there = model.network(x), model.network(model.seen[-2])
    distance = (here.softmax(1) - there.softmax(1)).square().sum(1).mean()
    torch.testing.assert_close(found, F.cross_entropy(there, y) + 10 * factor * distance)
    assert 10 * distance > 0.01
