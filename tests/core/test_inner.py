"""Losses with an inner problem of their own: what they maximise, the gradient they add, and the network they leave."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from elle.core.attacks.network import in_eval_mode
from elle.core.linearity import input_gradient
from elle.core.losses import Bilevel, Guided, LatentStep, WorstGap, nuclear_norm
from elle.methods import METHODS
from elle.models.registry import build_model
from tests.networks import conv_net, gradient, images, relative_distance, smooth_net

EPS = 16 / 255


def when(steps=0, share=0.0):
    return torch.tensor(steps), torch.tensor(share)


class Watched(nn.Module):
    """A network that writes down the points it is given."""

    def __init__(self, network):
        super().__init__()
        self.network, self.seen = network, []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return self.network(x)


def flat_images(count=6, inputs=12):
    """Images away from 0 and 1, so that the ball alone bounds a step."""
    x = 0.3 + 0.4 * torch.rand(count, inputs, generator=torch.Generator().manual_seed(5))
    return x, torch.arange(count) % 4


# Nuclear norm


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


# GAT and NuAT

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


# SLAT


def latent_pass(loss, network, x, y, place):
    """What goes into module `place` + 1 in the last forward, and the output of `place` that it was made of."""
    outputs, inputs, images_in = [], [], []
    handles = [
        network[place].register_forward_hook(lambda module, arguments, output: outputs.append(output.detach())),
        network[place + 1].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].detach())),
        network[0].register_forward_pre_hook(lambda module, arguments: images_in.append(arguments[0].detach())),
    ]
    loss(network, x, y, x, EPS, when())
    for handle in handles:
        handle.remove()
    return outputs[-1], inputs[-1], images_in[-1]


def channel_range(values):
    return values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_latent_step_moves_an_activation_along_the_sign_of_its_gradient_inside_its_range(place):
    network, (x, y) = conv_net(), images(8)
    output, moved, points = latent_pass(LatentStep(latent=1, bounded=True, layers=str(place)), network, x, y, place)
    leaf = x.clone().requires_grad_()
    hidden = network[: place + 1](leaf)
    loss = F.cross_entropy(network[place + 1 :](hidden), y)
    of_image, of_hidden = torch.autograd.grad(loss, [leaf, hidden])
    torch.testing.assert_close(points, (x + 0.9 * EPS * of_image.sign()).clamp(*channel_range(x)))
    expected = (output + EPS * of_hidden.sign()).clamp(*channel_range(output))
    torch.testing.assert_close(moved, expected)
    whole = ((moved - output).abs() - EPS).abs() < 1e-5
    assert 0.3 < whole.float().mean() < 1  # most go all the way, some are held by the range


def test_a_bounded_latent_step_is_a_constant_for_the_weights():
    network, (x, y) = conv_net(), images(8)
    loss = LatentStep(latent=1, bounded=True, layers="0")
    output, moved, points = latent_pass(loss, network, x, y, 0)
    loss(network, x, y, x, EPS, when())[0].backward()
    found = gradient(network)
    network.zero_grad()
    F.cross_entropy(network[1:](network[0](points) + (moved - output)), y).backward()
    assert relative_distance(found, gradient(network)) < 1e-4


def test_unbounded_a_latent_step_is_whole_and_the_image_stays_in_the_pixel_range():
    """The form of the authors of SLAT, whose latent step is 1.8 eps."""
    network, (x, y) = conv_net(), images(8)
    x = (0.2 + 0.6 * x).clamp(max=0.99)
    loss = LatentStep(layers="0")
    output, moved, points = latent_pass(loss, network, x, y, 0)
    leaf = x.clone().requires_grad_()
    hidden = network[0](leaf)
    slopes = torch.autograd.grad(F.cross_entropy(network[1:](hidden), y), [leaf, hidden])
    torch.testing.assert_close(points, (x + 0.9 * EPS * slopes[0].sign()).clamp(0, 1))
    torch.testing.assert_close(moved, output + 1.8 * EPS * slopes[1].sign())
    loss(network, x.round(), y, x, EPS, when())[0].backward()
    _, _, points = latent_pass(loss, network, x.round(), y, 0)
    assert points.min() >= 0
    assert points.max() <= 1


def test_a_latent_step_of_a_linear_layer_has_no_range():
    network, (x, y) = smooth_net(64), images(8)
    output, moved, _ = latent_pass(LatentStep(latent=1, bounded=True, layers="1"), network, x, y, 1)
    torch.testing.assert_close((moved - output).abs(), torch.full_like(output, EPS), rtol=1e-4, atol=1e-6)


def test_without_steps_the_latent_loss_is_the_clean_one():
    network, (x, y) = conv_net(), images(8)
    loss, logits = LatentStep(alpha=0, latent=0)(network, x, y, x, EPS, when())
    torch.testing.assert_close(logits, network(x))
    torch.testing.assert_close(loss, F.cross_entropy(network(x), y))


def test_the_default_layers_are_the_first_convolution_and_the_first_stage():
    resnet = build_model("preact-resnet18", (3, 8, 8), 10)
    assert LatentStep().modules(resnet) == [resnet.conv, resnet.blocks[1]]  # two blocks a stage
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert LatentStep().modules(plain) == [plain[0], plain[2]]
    assert LatentStep().modules(conv_net())[0].in_channels == 1

    def block(stride=1):
        return nn.Sequential(nn.Conv2d(4, 4, 3, stride), nn.ReLU(), nn.Conv2d(4, 4, 3))

    stages = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(block(), block()), nn.Sequential(block(2), block()))
    assert LatentStep().modules(stages) == [stages[0], stages[1][1]]
    for stride in (1, 2):  # without a block that shrinks, the first one
        blocks = nn.Sequential(nn.Conv2d(1, 4, 3), block(), block(stride))
        assert LatentStep().modules(blocks) == [blocks[0], blocks[1]]


def test_a_layer_is_found_by_name_or_refused_by_name():
    network = conv_net()
    assert LatentStep(layers=" 2 ,0, 2").modules(network) == [network[2], network[0]]
    with pytest.raises(ValueError, match="has no layer 'conv9'; it has 0, 1"):
        LatentStep(layers="0,conv9").modules(network)
    with pytest.raises(ValueError, match="has no convolution"):
        LatentStep().modules(smooth_net())


def test_a_network_behind_a_normalising_layer_keeps_its_names_and_default_layers():
    resnet = build_model("preact-resnet18", (3, 8, 8), 10, normalise=([0.5] * 3, [0.2] * 3))
    conv, blocks = resnet.network.conv, resnet.network.blocks
    assert LatentStep(layers="conv,blocks.0").modules(resnet) == [conv, blocks[0]]  # as docs/methods.md has it
    assert LatentStep(layers="network.conv,network.blocks.0").modules(resnet) == [conv, blocks[0]]
    assert LatentStep().modules(resnet) == [conv, blocks[1]]
    with pytest.raises(ValueError, match="has no layer 'conv9'; it has normalise, network, conv, "):
        LatentStep(layers="conv9").modules(resnet)


def test_the_order_in_which_layers_are_named_does_not_matter():
    x, y = images(8)
    losses = [LatentStep(layers=layers)(conv_net(), x, y, x, EPS, when())[0] for layers in ("0,1,2", "2,0,1", "1,0,2")]
    assert losses[0] == losses[1] == losses[2]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(self.shared(self.shared(x).tanh()).tanh().flatten(1))


def test_a_layer_that_is_called_twice_is_moved_at_each_call():
    network, (x, y) = Twice(), images(8)
    leaf = x.clone().requires_grad_()
    first = network.shared(leaf)
    second = network.shared(first.tanh())
    slopes = torch.autograd.grad(F.cross_entropy(network.last(second.tanh().flatten(1)), y), [first, second])
    with torch.no_grad():
        hidden = x
        for slope in slopes:
            output = network.shared(hidden)
            hidden = (output + EPS * slope.sign()).clamp(*channel_range(output)).tanh()
        expected = network.last(hidden.flatten(1))
    _, logits = LatentStep(alpha=0, latent=1, bounded=True, layers="shared")(network, x, y, x, EPS, when())
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("fails_at", [1, 2, None])
def test_the_hooks_are_gone_afterwards_even_where_the_network_raises(fails_at):
    class Failing(nn.Identity):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == fails_at:
                raise RuntimeError("no memory")
            return x

    network = nn.Sequential(*conv_net(), Failing())
    x, y = images(8)
    try:
        LatentStep(layers="0,1")(network, x, y, x, EPS, when())
        assert fails_at is None
    except RuntimeError:
        assert fails_at is not None
    assert not any(module._forward_hooks for module in network.modules())


# Fast-BAT


def image_losses(network, parameters, x, y):
    return F.cross_entropy(functional_call(network, parameters, (x,)), y, reduction="none")


def unflattened(network, flat):
    sizes = [parameter.numel() for parameter in network.parameters()]
    parts = zip(network.named_parameters(), flat.split(sizes), strict=True)
    return {name: part.view(parameter.shape) for (name, parameter), part in parts}


def flattened(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def mixed_derivative(network, x, y):
    """d/dtheta of each image's input gradient, dense: [B, inputs, parameters]."""

    def slopes(flat):
        points = x.clone().requires_grad_()
        losses = image_losses(network, unflattened(network, flat), points, y)
        return torch.autograd.grad(losses.sum(), points, create_graph=True)[0]

    return torch.autograd.functional.jacobian(slopes, flattened(network))


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_the_gradient_of_the_bilevel_loss_is_the_dense_one(rate):
    weight, eps = 0.05, 0.1
    model = Watched(smooth_net(6, 3, seed=4).double())
    x, y = flat_images(5, 6)
    x, y = x.double(), y % 3
    torch.manual_seed(0)
    loss, _ = Bilevel(input_gradient, rate=rate, weight=weight)(model, x, y, x, eps, when())
    loss.backward()
    network, (_, before, after) = model.network, model.seen
    step = input_gradient(network, before, y)
    torch.testing.assert_close(after, x + (before + rate * step - x).clamp(-eps, eps))
    inside = ((before + rate * step - x).abs() < eps).double()
    assert 0.1 < inside.mean() < 1
    outer = input_gradient(network, after, y)
    implicit = torch.einsum("bip,bi->p", mixed_derivative(network, before, y), inside * outer) / weight / len(x)
    parameters = list(network.parameters())
    direct = torch.autograd.grad(F.cross_entropy(network(after), y), parameters)
    direct = torch.cat([part.flatten() for part in direct])
    assert relative_distance(direct, direct + implicit) > 0.05  # the term is large enough to be seen
    assert relative_distance(gradient(network), direct + implicit) < 1e-5


@pytest.mark.parametrize("clip", ["ball", "pixels"])
def test_a_point_on_the_edge_carries_no_implicit_gradient(clip):
    """With a step that leaves the ball, or [0, 1], in every coordinate only the direct gradient is left."""
    eps = 8 / 255
    model = Watched(smooth_net(seed=4))
    x, y = torch.rand(16, 12, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4
    if clip == "pixels":
        x, eps = x.round(), 0.9
    Bilevel(input_gradient, rate=1e6, weight=1e-3)(model, x, y, x, eps, when())[0].backward()
    found = gradient(model)
    model.zero_grad()
    F.cross_entropy(model(model.seen[-1]), y).backward()
    torch.testing.assert_close(found, gradient(model))


def test_the_value_of_the_bilevel_loss_is_the_cross_entropy():
    model = Watched(smooth_net())
    x, y = flat_images()
    loss, logits = Bilevel(input_gradient, weight=0.01)(model, x, y, x, EPS, when())
    torch.testing.assert_close(logits, model.network(model.seen[-1]))
    torch.testing.assert_close(loss, F.cross_entropy(logits, y))


# The original LLR


def bent_net():
    """A smooth network whose loss is far from linear in a ball of 0.2."""
    network = smooth_net(seed=6)
    with torch.no_grad():
        network[1].weight *= 4
        network[3].weight *= 3
    return network


def gap(network, x, y, d):
    slope = input_gradient(network, x, y)
    there, here = (F.cross_entropy(network(points), y, reduction="none") for points in (x + d, x))
    return (there - here - (d * slope).sum(1)).abs().detach()


def test_the_worst_gap_is_above_those_of_random_points():
    eps, model = 0.2, Watched(bent_net())
    x, y = flat_images(16)
    torch.manual_seed(0)
    WorstGap(input_gradient)(model, x, y, x, eps, when())
    d = model.seen[-1].chunk(2)[1] - x
    assert d.abs().max() <= eps * (1 + 1e-5)
    found = gap(model.network, x, y, d)
    random = torch.stack([gap(model.network, x, y, (2 * torch.rand_like(x) - 1) * eps) for _ in range(200)])
    assert (found > random.mean(0)).all()
    assert found.mean() > random.max(0).values.mean()


def test_more_steps_find_a_larger_gap():
    eps, means = 0.2, []
    x, y = flat_images(16)
    for steps in (1, 20):
        model = Watched(bent_net())
        torch.manual_seed(0)
        WorstGap(input_gradient, steps=steps, rate=0.02)(model, x, y, x, eps, when())
        means.append(gap(model.network, x, y, model.seen[-1].chunk(2)[1] - x).mean())
    assert means[0] < means[1]


def test_the_weights_of_the_original_llr_are_its_authors():
    """2 CE + 4 (gap + 0.3 |slope|) in their code for CIFAR-10: the slope's 0.3 is inside the regulariser's 4."""
    loss = METHODS["llr-original"].loss
    assert (loss.nominal, loss.weight, loss.weight * loss.slope) == (2.0, 4.0, pytest.approx(1.2))


def test_the_worst_gap_is_sought_inside_the_pixel_range():
    model, (x, y) = Watched(smooth_net(seed=6)), flat_images(16)
    x = x.round()
    WorstGap(input_gradient)(model, x, y, x, EPS, when())
    searched = model.seen[2:]
    assert all(points.min() >= 0 and points.max() <= 1 for points in searched)
    assert all((points - x).abs().max() <= EPS * (1 + 1e-5) for points in searched[:-1])
    assert (searched[-2] != x).any()


def test_the_gradient_of_the_original_llr_agrees_with_differences_at_a_frozen_point():
    eps, model = 0.2, Watched(bent_net().double())
    x, y = flat_images(8)
    x = x.double()
    loss, logits = WorstGap(input_gradient, nominal=1.5, weight=2.0, slope=0.7)(model, x, y, x, eps, when())
    loss.backward()
    network = model.network
    d = model.seen[-1].chunk(2)[1] - x

    def value(flat):
        parameters = unflattened(network, flat)
        here, there = (image_losses(network, parameters, points, y) for points in (x, x + d))
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(image_losses(network, parameters, leaf, y).sum(), leaf)
        linear = (d * slope).sum(1)
        return float((1.5 * here + 2.0 * ((there - here - linear).abs() + 0.7 * linear.abs())).mean())

    at = flattened(network)
    assert loss.item() == pytest.approx(value(at), rel=1e-5)
    torch.testing.assert_close(logits, network(x).float())
    found = gradient(network)
    for seed in range(5):
        direction = torch.randn(len(at), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        slope = (value(at + 1e-6 * direction) - value(at - 1e-6 * direction)) / 2e-6
        assert float(found @ direction) == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_a_gradient_that_is_no_number_does_not_move_the_worst_gap():
    """As half precision may have it: the points it is sought at stay finite, and so does the loss."""

    class NoGradientAtZero(nn.Module):
        def forward(self, x):
            return network(x + 0 * (x - x.detach()).abs().sqrt() * (x == 0))

    network, (x, y) = smooth_net(), flat_images()
    x[:, ::3] = 0
    model = Watched(NoGradientAtZero())
    (slope,) = torch.autograd.grad(model(leaf := x.clone().requires_grad_()).sum(), leaf)
    assert slope.isnan().any()
    value, _ = WorstGap(lambda model, x, y, differentiable: torch.zeros_like(x))(model, x, y, x, EPS, when())
    assert value.isfinite()
    assert all(points.isfinite().all() for points in model.seen)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Guided(in_eval_mode, "cosine"), "distance"),
        (lambda: Guided(in_eval_mode, weight=-1.0), "weight"),
        (lambda: Guided(in_eval_mode, weight=math.nan), "weight"),
        (lambda: Bilevel(input_gradient, weight=0.0), "weight"),
        (lambda: Bilevel(input_gradient, weight=math.inf), "weight"),
        (lambda: Bilevel(input_gradient, steps=0), "steps"),
        (lambda: WorstGap(input_gradient, weight=-1.0), "weight"),
        (lambda: WorstGap(input_gradient, slope=-0.1), "slope"),
        (lambda: WorstGap(input_gradient, nominal=-1.0), "nominal"),
        (lambda: WorstGap(input_gradient, steps=0), "steps"),
    ],
)
def test_a_bad_setting_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} is "):
        make()


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
