"""Attacks are optimal where the optimum is known, stay inside their bounds and leave no trace on the network."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from elle.core.attacks import Replay, SignStep, fgsm, n_fgsm, pgd
from elle.core.attacks.network import begun
from elle.core.linearity import input_gradient
from tests.networks import Affine, conv_net, images, smooth_net, trained

EPS = 8 / 255
ATTACKS = {
    "fgsm": fgsm,
    "fgsm-clip": functools.partial(fgsm, clip=True),
    "fgsm-l2": functools.partial(fgsm, norm="l2"),
    "n-fgsm": n_fgsm,
    "pgd": functools.partial(pgd, steps=3),
    "pgd-l2": functools.partial(pgd, steps=3, norm="l2"),
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)


def length(delta, norm):
    return delta.flatten(1).norm(dim=1, p=math.inf if norm == "linf" else 2)


def loss(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y)


@pytest.fixture
def data():
    return images(16)


@pytest.fixture
def model(data):
    return trained(conv_net(), *data, steps=5, lr=0.02)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("attack", [fgsm, functools.partial(pgd, steps=40)], ids=["fgsm", "pgd"])
def test_the_attack_is_optimal_on_a_linear_model(norm, attack):
    """The margin of w falls by eps * |w|_1 in the l-infinity ball and by eps * |w|_2 in the l2 ball."""
    model = Affine(classes=2)
    x = 0.3 + 0.4 * torch.rand(32, 12, generator=torch.Generator().manual_seed(0))
    y = torch.arange(32) % 2
    w = (model.weight[0] - model.weight[1]).detach() * (1 - 2 * y).unsqueeze(1)
    best = x - EPS * (w.sign() if norm == "linf" else w / w.norm(dim=1, keepdim=True))
    torch.manual_seed(0)
    x_adv = attack(model, x, y, EPS, norm=norm)
    fall, best_fall = ((x - x_adv) * w).sum(1), ((x - best) * w).sum(1)
    torch.testing.assert_close(fall, best_fall, rtol=1e-4 if attack is fgsm else 0.03, atol=0)
    if attack is fgsm:
        torch.testing.assert_close(x_adv, best, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("eps", [EPS, 0.5])
@pytest.mark.parametrize("noise", [0, 1, 2])
def test_the_points_are_inside_the_ball_and_the_pixel_range(model, data, norm, eps, noise):
    x, y = data
    x = x.round()
    x_adv = SignStep(alpha=0.7, steps=3, noise=noise, clip=True, norm=norm)(model, x, y, eps)
    assert length(x_adv - x, norm).max() <= eps * (1 + 1e-5)
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


def test_fgsm_moves_every_pixel_by_eps(model, data):
    x, y = data
    torch.testing.assert_close((fgsm(model, x, y, EPS) - x).abs(), torch.full_like(x, EPS), rtol=1e-4, atol=1e-6)


def test_the_random_start_of_an_l2_attack_is_inside_its_ball():
    """A model without any gradient leaves the points where they started."""
    model = Affine()
    torch.nn.init.zeros_(model.weight)
    x, y = torch.full((200, 12), 0.5), torch.zeros(200, dtype=torch.long)
    start = length(SignStep(noise=1, norm="l2")(model, x, y, EPS) - x, "l2")
    assert start.max() <= EPS * (1 + 1e-5)
    assert start.max() > 0.9 * EPS
    assert start.std() > 0.1 * EPS


def test_n_fgsm_is_its_formula(model, data):
    x, y = data
    model.eval()
    torch.manual_seed(11)
    eta = (2 * torch.rand_like(x) - 1) * 2 * EPS
    point = (x + eta).requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
    torch.manual_seed(11)
    torch.testing.assert_close(n_fgsm(model, x, y, EPS), x + eta + EPS * gradient.sign())


def test_the_noise_of_n_fgsm_has_the_radius_asked_for(model, data):
    delta = n_fgsm(model, *data, EPS, noise=3) - data[0]
    assert 3.5 * EPS < delta.abs().max() <= 4 * EPS * (1 + 1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_more_steps_find_a_higher_loss(model, data, norm):
    x, y = data
    eps = 0.1 if norm == "linf" else 0.5
    model.eval()
    clean, one = loss(model, x, y), loss(model, fgsm(model, x, y, eps, clip=True, norm=norm), y)
    torch.manual_seed(0)
    many = loss(model, pgd(model, x, y, eps, steps=20, norm=norm), y)
    assert clean < one <= many * 1.001


@every_attack
def test_no_gradient_is_left_on_the_parameters_or_on_the_result(model, data, attack):
    for parameter in model.parameters():
        parameter.grad = None
    x, y = data
    x_adv = attack(model, x.requires_grad_(), y, EPS)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert not x_adv.requires_grad


@every_attack
def test_the_images_and_the_flags_of_the_parameters_are_left_alone(model, data, attack):
    x, y = data
    kept = x.clone()
    frozen = next(model.parameters()).requires_grad_(False)
    attack(model, x, y, EPS)
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert [p.requires_grad for p in model.parameters()] == [p is not frozen for p in model.parameters()]


@every_attack
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_network_is_left_alone(model, data, attack, training):
    model.train(training)
    model[1].eval()
    attack(model, *data, EPS)
    assert [module.training for module in model] == [training, False, training, training, training]


@every_attack
def test_in_eval_mode_the_running_statistics_do_not_move(model, data, attack):
    model.eval()
    before = {name: value.clone() for name, value in model.named_buffers()}
    attack(model, *data, EPS)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@every_attack
def test_the_attack_works_under_no_grad(model, data, attack):
    model.eval()
    results = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with torch.set_grad_enabled(enabled):
            results.append(attack(model, *data, EPS))
            assert torch.is_grad_enabled() is enabled
    assert torch.equal(*results)


@every_attack
def test_the_same_seed_gives_the_same_points(model, data, attack):
    model.eval()
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(attack(model, *data, EPS))
    assert torch.equal(*results)


@pytest.mark.parametrize("attack", [n_fgsm, pgd], ids=["n-fgsm", "pgd"])
def test_another_seed_gives_other_points(model, data, attack):
    model.eval()
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        results.append(attack(model, *data, EPS))
    assert not torch.equal(*results)


@every_attack
def test_a_tensor_radius_is_the_same_as_a_number(model, data, attack):
    model.eval()
    results = []
    for eps in (EPS, torch.tensor(EPS)):
        torch.manual_seed(0)
        results.append(attack(model, *data, eps))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_image_is_attacked_the_same_alone_and_in_a_batch(norm):
    x, y = images(4, shape=(12,))
    model = smooth_net()
    together = fgsm(model, x, y, EPS, norm=norm)
    torch.testing.assert_close(fgsm(model, x[:1], y[:1], EPS, norm=norm), together[:1])


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("project", [True, False])
def test_a_step_on_a_confident_model_is_no_longer_than_eps(norm, project):
    """At a margin of 65 the gradient is about 1e-28, and its square is 0 in float32."""
    model = Affine(classes=2)
    x = torch.full((4, 12), 0.5)
    y = torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        logits = model(x)[0]
        model.bias += torch.tensor([65.0, 0]) - logits
    delta = SignStep(project=project, norm=norm)(model, x, y, EPS) - x
    assert length(delta, norm).max() <= EPS * (1 + 1e-4)
    assert length(delta, norm).min() >= EPS * (1 - 1e-2)


def test_the_default_step_of_pgd_reaches_across_the_ball(model, data):
    seen = {}
    for alpha in (None, 2.5 / 4):
        torch.manual_seed(0)
        seen[alpha] = pgd(model.eval(), *data, EPS, steps=4, alpha=alpha)
    assert torch.equal(*seen.values())


def test_a_step_of_pgd_that_is_written_without_eps_is_refused(model, data):
    with pytest.raises(ValueError, match=r"alpha is 0.00784314 in units of eps: 20 steps .* \(2 / 255\) / eps"):
        pgd(model, *data, 8 / 255, alpha=2 / 255)
    pgd(model, *data, 8 / 255, steps=4, alpha=(2 / 255) / (8 / 255))


@every_attack
def test_radii_of_images_are_told_from_radii_of_columns(model, data, attack):
    """Eight images of 8 x 8 pixels: broadcast, the radius of image k would be that of column k of each."""
    (x, y), radii = data, torch.linspace(0.01, EPS, 8)
    x, y = x[:8], y[:8]
    assert x.shape[-1] == len(x)
    with pytest.raises(ValueError, match=r"eps has shape \[8\]; .*eps.view\(-1, 1, 1, 1\)"):
        attack(model, x, y, radii)
    moved = (attack(model, x, y, radii.view(-1, 1, 1, 1)) - x).flatten(1).abs().amax(1)
    assert (moved <= 3.01 * radii).all()  # n-fgsm starts two radii away


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_radii_of_channels_are_those_of_a_box_alone(norm):
    """An l2 ball has one radius: steps of an ellipsoid would be projected to something else."""
    (x, y), radii = images(4, shape=(3, 8, 8)), torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
    if norm == "l2":
        with pytest.raises(ValueError, match=r"eps has shape \[1, 3, 1, 1\]; .*eps.view\(-1, 1, 1, 1\)"):
            pgd(conv_net(3), x, y, radii, norm=norm)
        return
    moved = (fgsm(conv_net(3), x, y, radii, norm=norm) - x).abs()
    torch.testing.assert_close(moved, radii.expand_as(moved))


@every_attack
def test_radii_that_would_change_the_type_of_the_images_are_refused(model, data, attack):
    with pytest.raises(ValueError, match=r"eps is torch.float64 and x torch.float32, .*eps.to\(x.dtype\)"):
        attack(model, *data, torch.full((16, 1, 1, 1), EPS, dtype=torch.float64))


@pytest.mark.parametrize("answer", [lambda z: z, lambda z: z.squeeze(1)], ids=["column", "row"])
def test_a_network_of_one_logit_is_refused(answer):
    """Its cross-entropy is 0, and the attack returned the images; a row was taken for the classes of one image."""
    x, network = torch.rand(4, 12), Affine(classes=1)
    with pytest.raises(ValueError, match=r"logits of shape \[4.*torch.cat\(\[torch.zeros_like\(z\), z\], 1\)"):
        fgsm(lambda points: answer(network(points)), x, answer(torch.ones(4, 1)), EPS)


def test_a_single_logit_beside_a_zero_is_attacked_as_its_binary_loss():
    x, y, network = torch.rand(4, 12), torch.tensor([0, 1, 1, 0]), Affine(classes=1)

    def two(points):
        z = network(points)
        return torch.cat([torch.zeros_like(z), z], 1)

    along = (2 * y[:, None] - 1) * -network.weight.sign()
    torch.testing.assert_close(fgsm(two, x, y, EPS), (x + EPS * along).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_l2_attack_on_half_precision_images_is_as_long_as_on_others(dtype):
    """The least length that may divide is 0 in fp16: an image without a gradient became no number."""
    x, y = torch.rand(2, 12).to(dtype), torch.tensor([0, 0])
    network = Affine().to(dtype)
    found = fgsm(lambda points: network(points * torch.tensor([[0.0], [1.0]]).to(dtype)), x, y, 0.5, norm="l2")
    assert found.dtype is dtype
    assert torch.equal(found[0], x[0])
    assert float((found[1] - x[1]).float().norm()) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"steps": 0}, {"steps": -1}, {"norm": "l1"}, {"norm": "inf"}, {"alpha": -1}, {"alpha": math.nan}),
        *({"noise": -1}, {"steps": 2.5}, {"steps": "3"}, {"alpha": "1"}, {"noise": None}, {"clip": (-1, 1)}),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SignStep(**arguments)


@every_attack
def test_images_of_whole_numbers_are_refused(model, data, attack):
    with pytest.raises(ValueError, match=r"x is torch.uint8.*x.float\(\) / 255"):
        attack(model, (255 * data[0]).to(torch.uint8), data[1], EPS)


@every_attack
def test_labels_that_are_no_tensor_are_refused(model, data, attack):
    with pytest.raises(ValueError, match="y is a list; give a tensor"):
        attack(model, data[0], data[1].tolist(), EPS)


@every_attack
@pytest.mark.parametrize("eps", [8, -EPS, math.nan, math.inf])
def test_a_radius_that_cannot_be_meant_is_refused(model, data, attack, eps):
    if attack is ATTACKS["fgsm-l2"] or attack is ATTACKS["pgd-l2"]:
        eps = -abs(eps)  # a long l2 radius is one that may be meant
    with pytest.raises(ValueError, match=r"eps is .*8/255"):
        attack(model, *data, eps)


def test_labels_may_be_probabilities(model, data):
    x, y = data
    assert torch.equal(fgsm(model, x, F.one_hot(y, 4).float(), EPS), fgsm(model, x, y, EPS))


def linear_case():
    """A two-class linear model, whose loss has the gradient of its one direction everywhere up to a factor."""
    x = 0.3 + 0.4 * torch.rand(6, 12, generator=torch.Generator().manual_seed(0))
    return Affine(classes=2), x, torch.arange(6) % 2


@pytest.mark.parametrize("shape", [lambda y: y[:, None], lambda y: y[:, None].float(), lambda y: F.one_hot(y, 10)])
def test_labels_in_another_shape_are_refused_with_the_shapes_there_are(model, data, shape):
    x, y = data
    with pytest.raises(ValueError, match=r"for logits \[16, .*labels \[B\], .*or probabilities \[B, K\] as floats"):
        fgsm(model, x, shape(y), EPS)


def test_a_sign_start_is_at_a_corner_of_the_ball():
    model, x, y = linear_case()
    torch.manual_seed(0)
    x_adv = SignStep(alpha=0.0, noise=0.5, start="sign")(model, x, y, EPS)
    assert (x_adv - x).abs().flatten().tolist() == pytest.approx([EPS / 2] * x.numel(), rel=1e-4)


def test_a_sign_start_of_an_l2_attack_is_as_far_from_x_as_the_noise_says():
    model, x, y = linear_case()
    x_adv = SignStep(alpha=0.0, noise=0.5, start="sign", norm="l2")(model, x, y, EPS)
    assert length(x_adv - x, "l2").tolist() == pytest.approx([EPS / 2] * len(x), rel=1e-4)


def test_a_step_where_random_points_agree_is_as_long_in_l2_as_alpha_says():
    model, x, y = linear_case()
    x_adv = SignStep(alpha=0.5, noise=1, agree=3, norm="l2")(model, x, y, EPS)
    assert length(x_adv - x, "l2").tolist() == pytest.approx([EPS / 2] * len(x), rel=1e-4)


def test_steps_may_be_numpy_s_as_those_of_an_array_are(model, data):
    torch.manual_seed(0)
    expected = pgd(model, *data, EPS, steps=3)
    torch.manual_seed(0)
    assert torch.equal(pgd(model, *data, EPS, steps=np.arange(4)[3]), expected)


@pytest.mark.parametrize("fields", [{"steps": 2}, {"zero": 0.5}, {"frank_wolfe": True}])
def test_a_step_where_random_points_agree_refuses_what_it_would_ignore(fields):
    with pytest.raises(ValueError, match="agree is 3: that is one step; leave steps, zero and frank_wolfe out"):
        SignStep(agree=3, **fields)


def test_r_fgsm_ends_on_the_ball_or_at_x():
    """Half a step of random sign and half along the gradient: each coordinate moves by 0 or eps."""
    model, x, y = linear_case()
    torch.manual_seed(0)
    moved = (SignStep(alpha=0.5, noise=0.5, start="sign")(model, x, y, EPS) - x).abs() / EPS
    assert ((moved < 1e-4) | ((moved - 1).abs() < 1e-4)).all()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_zero_leaves_the_smallest_gradients_out(share):
    model, x, y = linear_case()
    x_adv = SignStep(zero=share)(model, x, y, EPS)
    moved = ((x_adv - x).abs() > EPS / 2).flatten(1)
    gradient = input_gradient(model, x, y).abs().flatten(1)
    assert (moved.sum(1) == x[0].numel() - round(share * x[0].numel())).all()
    for row, size in zip(moved, gradient, strict=True):
        assert size[row].min() >= size[~row].max()


def test_where_random_points_agree_the_full_step_is_taken_and_elsewhere_none():
    model, x, y = linear_case()
    x_adv = SignStep(alpha=2, noise=1, agree=3)(model, x, y, EPS)
    torch.testing.assert_close(x_adv, SignStep()(model, x, y, EPS))  # a linear loss: all points agree
    bent = smooth_net(x[0].numel(), seed=3)
    moved = (SignStep(alpha=1, noise=20, agree=9, project=False)(bent, x, y, EPS) - x).abs()
    assert ((moved < 1e-6) | ((moved - EPS).abs() < 1e-5)).all()
    assert 0 < (moved > EPS / 2).float().mean() < 1


def test_the_random_points_that_are_to_agree_are_images_where_the_attack_clips():
    network, seen = smooth_net(12), []

    def model(points):
        seen.append(points.detach())
        return network(points)

    x, y = torch.rand(5, 12).round(), torch.zeros(5, dtype=torch.int64)  # every pixel is at an end
    SignStep(alpha=2, noise=1, agree=3, clip=True)(model, x, y, EPS)
    assert len(seen) == 3
    for points in seen:
        assert 0 <= points.min() < points.max() <= 1
        assert 0 < ((points - x).abs() > 1e-6).float().mean() < 1  # half of the noise is inward, and stays


def test_the_kl_objective_moves_the_prediction_and_ignores_the_labels():
    net = smooth_net(12)
    x, y = torch.rand(5, 12), torch.zeros(5, dtype=torch.int64)
    attack = SignStep(noise=0.001, start="normal", objective="kl", steps=5, alpha=0.5)
    found = []
    for labels in (y, y + 1):
        torch.manual_seed(2)
        found.append(attack(net, x, labels, 0.2))
    assert torch.equal(*found)
    before, after = net(x).log_softmax(1), net(found[0]).log_softmax(1)
    small = net(x + 0.2 * torch.randn_like(x).sign()).log_softmax(1)
    divergence = (before.exp() * (before - after)).sum(1).mean()
    assert divergence > (before.exp() * (before - small)).sum(1).mean()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_frank_wolfe_stays_in_the_ball_without_projection(model, data, norm, steps):
    x, y = data
    x_adv = SignStep(steps=steps, frank_wolfe=True, project=False, norm=norm)(model.eval(), x, y, EPS)
    assert length(x_adv - x, norm).max() <= EPS * (1 + 1e-5)
    if steps == 1:
        torch.testing.assert_close(x_adv, fgsm(model, x, y, EPS, norm=norm))
    else:
        assert length(x_adv - fgsm(model, x, y, EPS, norm=norm), norm).max() > 0.1 * EPS


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_frank_wolfe_stays_at_the_optimum_of_a_linear_model(norm):
    model, x, y = linear_case()
    x_adv = SignStep(steps=4, frank_wolfe=True, project=False, norm=norm)(model, x, y, EPS)
    torch.testing.assert_close(x_adv, fgsm(model, x, y, EPS, norm=norm))


def test_frank_wolfe_goes_two_of_t_and_two_of_the_way_to_each_vertex():
    signs = iter([1, -1, 1, 1])

    def turning(x):
        """A linear model whose slope turns at each call: the vertices are +eps, -eps, +eps, +eps."""
        logit = next(signs) * x.sum(1)
        return torch.stack([-logit, logit], 1)

    x, y = torch.full((3, 5), 0.5), torch.zeros(3, dtype=torch.int64)
    x_adv = SignStep(steps=4, frank_wolfe=True, project=False)(turning, x, y, EPS)
    place = 1.0
    for t, vertex in ((1, -1), (2, 1), (3, 1)):
        place += 2 / (t + 2) * (vertex - place)
    torch.testing.assert_close(x_adv, x + place * EPS)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_replayed_perturbation_moves_up_the_gradient_and_stays_in_the_ball(model, data, norm):
    x, y = data
    replay, delta, model = Replay(norm=norm), torch.zeros_like(x), model.eval()
    for step in range(4):
        x_adv = replay.points(x, delta)
        assert x_adv.is_leaf
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        F.cross_entropy(model(x_adv), y).backward()
        delta = replay.moved(delta, x_adv.grad, EPS)
        assert length(delta, norm).max() <= EPS * (1 + 1e-5)
        if step == 0:
            torch.testing.assert_close(x + delta, fgsm(model, x, y, EPS, norm=norm))


def test_a_replayed_perturbation_moves_on_from_where_it_was():
    delta, gradient = torch.tensor([[0.1, -0.1, 0.04, 0.0]]), torch.tensor([[-3.0, -2.0, 1.0, 0.5]])
    moved = Replay(alpha=0.5).moved(delta, gradient, 0.1)
    torch.testing.assert_close(moved, torch.tensor([[0.05, -0.1, 0.09, 0.05]]))


def test_a_replayed_perturbation_survives_a_gradient_that_is_not_finite():
    x = torch.full((3, 5), 0.5)
    gradient = torch.ones_like(x)
    gradient[0], gradient[1, 0] = math.nan, math.inf
    delta = Replay().moved(torch.zeros_like(x), gradient, EPS)
    assert delta.isfinite().all()
    torch.testing.assert_close(delta[2], torch.full((5,), EPS))


@pytest.mark.parametrize("arguments", [{"replays": 0}, {"norm": "l1"}], ids=str)
def test_a_bad_setting_of_replays_is_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Replay(**arguments)


@every_attack
def test_inference_mode_around_an_attack_changes_nothing(attack, model, data):
    def attacked(x, y):
        torch.manual_seed(0)
        return attack(model, x, y, EPS)

    expected = attacked(*data)
    with torch.inference_mode():
        assert torch.equal(attacked(*data), expected)
        assert torch.equal(attacked(*(part.clone() for part in data)), expected)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_fgsm_is_clipped_where_it_is_asked(norm):
    model, x = Affine(), torch.rand(16, 12, generator=torch.Generator().manual_seed(0)).round()
    y = torch.arange(16) % 4
    x_adv = fgsm(model, x, y, EPS, norm=norm)
    assert x_adv.aminmax()[0] < 0
    assert x_adv.aminmax()[1] > 1
    assert torch.equal(fgsm(model, x, y, EPS, clip=True, norm=norm), x_adv.clip(0, 1))


def test_pgd_steps_as_far_as_alpha_says():
    """Of two classes, with a constant direction: two steps of 0.6 eps from a start drawn after the same seed."""
    model, x = Affine(classes=2), torch.full((16, 12), 0.5)
    y = torch.arange(16) % 2
    towards = ((model.weight[1] - model.weight[0]).detach() * (1 - 2 * y).unsqueeze(1)).sign()
    torch.manual_seed(0)
    delta = (2 * torch.rand_like(x) - 1) * EPS
    for _ in range(2):
        delta = (delta + 0.6 * EPS * towards).clip(-EPS, EPS)
    torch.manual_seed(0)
    torch.testing.assert_close(pgd(model, x, y, EPS, steps=2, alpha=0.6), x + delta)
    assert (delta.abs() < 0.99 * EPS).any()


def test_two_random_points_agree_like_more():
    model, x = Affine(classes=2), torch.rand(4, 12)
    y = torch.arange(4) % 2
    x_adv = SignStep(noise=1, agree=2)(model, x, y, EPS)
    torch.testing.assert_close(x_adv, fgsm(model, x, y, EPS))  # from x, and not from a random point


def test_a_replayed_perturbation_is_trained_on_inside_the_pixel_range_where_that_is_asked():
    x, delta = torch.tensor([[0.0, 0.5, 1.0, 1.0]]), torch.tensor([[-0.1, 0.1, 0.1, -0.1]])
    torch.testing.assert_close(Replay(clip=True).points(x, delta), torch.tensor([[0.0, 0.6, 1.0, 0.9]]))
    torch.testing.assert_close(Replay(clip=False).points(x, delta), torch.tensor([[-0.1, 0.6, 1.1, 0.9]]))


@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_a_backward_begins_with_the_slope_it_is_given(shape):
    x, slope = torch.randn(5, requires_grad=True), torch.randn(shape)
    value = x.square().sum() * torch.arange(1.0, 1 + slope.numel()).reshape(shape)
    (expected,) = torch.autograd.grad(value, x, slope, retain_graph=True)
    (found,) = torch.autograd.grad(begun(value, slope), x)
    assert torch.equal(found, expected)
