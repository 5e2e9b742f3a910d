"""The linearity errors have the values that their definitions give."""

import math

import pytest
import torch
import torch.nn.functional as F

from elle.core.linearity import Linearity, gradient_misalignment, triplet_error, uniform_in_ball
from tests.networks import Affine, Quadratic, bfloat16_autocast, conv_net, images, own_logit, smooth_net, trained

EPS = 0.1


def batch(count=6, dtype=torch.float32, classes=4):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(count, 3, 2, 2, generator=generator).to(dtype), torch.arange(count) % classes


def offsets(x, seed, eps=EPS, norm="linf"):
    """The two offsets that a triplet with fixed alpha draws after this seed."""
    torch.manual_seed(seed)
    return uniform_in_ball(x, eps, norm), uniform_in_ball(x, eps, norm)


class Recorder(torch.nn.Module):
    """Passes everything on to a network and keeps the inputs."""

    def __init__(self, model):
        super().__init__()
        self.model, self.inputs = model, []

    def forward(self, x):
        self.inputs.append(x.detach().clone())
        return self.model(x)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("alpha", ["uniform", 0.3])
def test_the_error_is_zero_where_the_loss_is_affine(norm, alpha):
    x, y = batch()
    error = Linearity(norm=norm, alpha=alpha)(Affine(), x, y, EPS, own_logit)
    assert error.shape == (6,)
    assert error.abs().max() < 1e-10


@pytest.mark.parametrize("alpha", ["uniform", 0.3])
def test_in_double_the_error_of_an_affine_loss_is_zero_to_double_precision(alpha):
    x, y = batch(dtype=torch.float64)
    error = Linearity(alpha=alpha)(Affine().double(), x, y, EPS, own_logit)
    assert error.sqrt().max() < 1e-12


@pytest.mark.parametrize("alpha", [0.01, 0.25, 0.5])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_error_of_a_quadratic_has_its_closed_form(alpha, norm):
    """L = x^T A x + b^T x has the gap -a (1-a) d^T A d, with d = x_a - x_b."""
    x, _ = batch()
    y = torch.zeros(6, dtype=torch.long)
    model = Quadratic()
    d = torch.sub(*offsets(x, seed=5, eps=1.0, norm=norm)).flatten(1).double()
    gap = -alpha * (1 - alpha) * torch.einsum("bi,ij,bj->b", d, model.matrix.double(), d)
    torch.manual_seed(5)
    error = Linearity(alpha=alpha, norm=norm)(model, x, y, 1.0, own_logit)
    torch.testing.assert_close(error.double(), gap.square(), rtol=1e-3, atol=1e-9)


def test_a_uniform_alpha_averages_to_a_thirtieth_of_the_squared_curvature():
    """E[a^2 (1-a)^2] = 1/30 for a ~ Unif[0, 1]: alpha is drawn, and for each image."""
    x = torch.zeros(20_000, 1)
    y = torch.zeros(20_000, dtype=torch.long)
    model = Quadratic(1)
    torch.manual_seed(0)
    error = Linearity()(model, x, y, 1.0, own_logit).mean()
    fourth_moment = 16 / 15  # of the difference of two Unif[-1, 1]
    expected = float(model.matrix.detach()) ** 2 * fourth_moment / 30
    assert float(error.detach()) == pytest.approx(expected, rel=0.06)


def test_the_gradient_with_respect_to_the_parameters_is_right():
    model = smooth_net().double()
    x, y = batch(4, torch.float64)
    names = [name for name, _ in model.named_parameters()]

    def error(*parameters):
        torch.manual_seed(0)
        values = dict(zip(names, parameters, strict=True))
        return triplet_error(lambda points: torch.func.functional_call(model, values, points), x, y, 1.0)

    assert torch.autograd.gradcheck(error, tuple(model.parameters()))


def test_the_gradient_is_the_slope_of_the_error_along_itself():
    """A float32 check of the gradient: central differences along one direction, on an error far above rounding."""
    model = smooth_net(seed=1)
    x, y = batch(32)
    names = [name for name, _ in model.named_parameters()]

    def error(parameters):
        torch.manual_seed(0)
        values = dict(zip(names, parameters, strict=True))
        return triplet_error(lambda points: torch.func.functional_call(model, values, points), x, y, 3.0).mean()

    parameters = list(model.parameters())
    slope = torch.autograd.grad(error(parameters), parameters)
    length = torch.sqrt(sum(part.square().sum() for part in slope))
    with torch.no_grad():
        ends = [
            error([p + h * g / length for p, g in zip(parameters, slope, strict=True)]).double() for h in (0.02, -0.02)
        ]
    assert float(ends[0] - ends[1]) / 0.04 == pytest.approx(float(length), rel=0.01)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("count", [1, 500])
def test_offsets_stay_inside_the_ball(norm, count):
    torch.manual_seed(0)
    delta = uniform_in_ball(torch.zeros(count, 3, 2, 2), EPS, norm).flatten(1)
    assert delta.norm(dim=1, p=math.inf if norm == "linf" else 2).max() <= EPS * (1 + 1e-6)


def test_linf_offsets_have_the_moments_of_the_uniform_distribution():
    torch.manual_seed(0)
    delta = uniform_in_ball(torch.zeros(40_000, 5), EPS)
    torch.testing.assert_close(delta.mean(0), torch.zeros(5), rtol=0, atol=4 * EPS / math.sqrt(3 * 40_000))
    torch.testing.assert_close(delta.var(0), torch.full((5,), EPS**2 / 3), rtol=0.03, atol=0)
    correlation = torch.corrcoef(delta.T) - torch.eye(5)
    assert correlation.abs().max() < 0.02


def test_l2_offsets_fill_the_ball_uniformly():
    """For a uniform point of the d-ball, (radius / eps)^d is Unif[0, 1] and no direction is preferred."""
    torch.manual_seed(0)
    count, d = 20_000, 5
    delta = uniform_in_ball(torch.zeros(count, d), EPS, "l2")
    volume = (delta.norm(dim=1) / EPS).pow(d).sort().values
    distance = (volume - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, p = 0.001
    torch.testing.assert_close(delta.mean(0), torch.zeros(d), rtol=0, atol=0.02 * EPS)
    torch.testing.assert_close(delta.T.cov(), torch.eye(d) * EPS**2 / (d + 2), rtol=0.05, atol=0.02 * EPS**2 / (d + 2))


@pytest.mark.parametrize(("norm", "p"), [("l2", 2), ("l1", 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offsets_of_large_half_precision_images_reach_the_edge_of_the_ball(norm, p, dtype):
    """In so many dimensions nearly all of a ball is at its edge; summed in fp16, the offsets were all 0."""
    delta = uniform_in_ball(torch.zeros(1, 3, 224, 224, dtype=dtype), 1.0, norm)
    assert delta.dtype is dtype
    assert float(torch.linalg.vector_norm(delta.double(), p)) == pytest.approx(1, rel=0.01)


def test_radii_of_images_are_those_of_all_their_samples():
    x, radii = torch.full((2, 12), 0.5), torch.tensor([[1e-3], [0.5]])
    seen = []
    Linearity(samples=3)(lambda points: seen.append(points) or smooth_net()(points), x, torch.tensor([0, 1]), radii)
    moved = (seen[0] - 0.5).abs().amax(1).view(3, 3, 2)  # points, samples, images
    assert (moved[:, :, 0] <= 1.001e-3).all()
    assert (moved[::2, :, 1] > 0.1).all()


def test_an_unknown_norm_of_the_ball_is_refused():
    with pytest.raises(ValueError, match="linf"):
        uniform_in_ball(torch.zeros(2, 3), EPS, "l0")


def test_two_samples_are_averaged_for_each_image():
    x, y = batch(classes=1)
    twice, model = x.repeat(2, 1, 1, 1), Quadratic()
    torch.manual_seed(7)
    single = Linearity()(model, twice, y.repeat(2), EPS, own_logit)
    torch.manual_seed(7)
    averaged = Linearity(samples=2)(model, x, y, EPS, own_logit)
    torch.testing.assert_close(averaged, single.view(2, 6).mean(0), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("samples", [1, 3])
def test_all_points_pass_the_network_in_one_forward(samples):
    model = Recorder(smooth_net())
    x, y = batch(5)
    Linearity(samples=samples)(model, x, y, EPS)
    assert [len(points) for points in model.inputs] == [3 * samples * 5]


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_three_points_are_in_the_ball_and_on_a_line(norm):
    model = Recorder(smooth_net())
    x, y = batch(5)
    Linearity(norm=norm, alpha=0.25)(model, x, y, EPS)
    x_a, x_c, x_b = model.inputs[0].chunk(3)
    torch.testing.assert_close(x_c, 0.75 * x_a + 0.25 * x_b)
    for points in (x_a, x_b, x_c):
        length = (points - x).flatten(1).norm(dim=1, p=math.inf if norm == "linf" else 2)
        assert length.max() <= EPS * (1 + 1e-5)


def test_clip_moves_what_is_outside_the_pixel_range_to_its_edge_and_nothing_else():
    ends = {}
    for clip in (True, False):
        model = Recorder(smooth_net())
        x, y = batch()
        torch.manual_seed(0)
        Linearity(clip=clip)(model, x.round(), y, EPS)
        x_a, _, x_b = model.inputs[0].chunk(3)
        ends[clip] = torch.stack([x_a, x_b])
    assert ends[False].amin((1, 2, 3, 4)).max() < 0
    assert ends[False].amax((1, 2, 3, 4)).min() > 1
    assert torch.equal(ends[True], ends[False].clip(0, 1))


@pytest.mark.parametrize("criterion", [F.cross_entropy, lambda logits, y: logits], ids=["scalar", "matrix"])
def test_a_criterion_without_one_loss_an_image_is_refused(criterion):
    x, y = batch()
    with pytest.raises(ValueError, match="one loss for each image"):
        triplet_error(smooth_net(), x, y, EPS, criterion)


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples": 0},
        {"alpha": 1.5},
        {"alpha": -0.1},
        {"alpha": 0},
        {"alpha": 1.0},
        {"alpha": True},
        {"alpha": math.nan},
        {"alpha": "half"},
        {"norm": "l0"},
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Linearity(**arguments)


@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (1, 12), (2, 12)])
def test_small_batches_and_flat_inputs_work(shape):
    x = torch.rand(shape)
    error = triplet_error(smooth_net(), x, torch.zeros(len(x), dtype=torch.long), EPS)
    assert error.shape == (len(x),)
    assert error.isfinite().all()


def test_a_tensor_radius_is_the_same_as_a_number():
    x, y = batch()
    values = []
    for eps in (EPS, torch.tensor(EPS)):
        torch.manual_seed(0)
        values.append(triplet_error(smooth_net(), x, y, eps))
        assert values[0].any()
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_compiler_does_not_merge_the_two_random_points(norm):
    """Were x_a = x_b, the error would be 0 and the penalty would do nothing, silently."""
    x, y = batch()
    model, error = smooth_net(), Linearity(norm=norm)
    values = []
    for function in (error, torch.compile(error, backend="aot_eager")):
        torch.manual_seed(0)
        values.append(function(model, x, y, 1.0))
    assert values[0].min() > 0
    torch.testing.assert_close(values[1], values[0], rtol=1e-2, atol=0)


class InBFloat16:
    """A forward that does take the bf16 autocast, whatever is around it."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        with bfloat16_autocast():
            return self.model(x)


def test_a_bfloat16_autocast_does_not_drown_the_error():
    x, y = images(64)
    model = trained(conv_net(), x, y, steps=12, lr=0.02).eval()

    def error(network):
        torch.manual_seed(0)
        return float(triplet_error(network, x, y, 8 / 255).mean().detach())

    exact = error(model)
    with bfloat16_autocast():
        guarded = error(model)
    assert guarded == pytest.approx(exact, rel=0.05)
    assert error(InBFloat16(model)) > 2 * exact, "bf16 does not matter for this network: the test shows nothing"


def test_the_two_point_form_takes_no_logits_of_a_bfloat16_forward():
    x, y = images(64)
    model = trained(conv_net(), x, y, steps=12, lr=0.02).eval()

    def error():
        adversarial = (x + 8 / 255, model(x + 8 / 255).float())
        torch.manual_seed(0)
        return Linearity(form="2p")(model, x, y, 8 / 255, adversarial=adversarial).detach()

    exact = error()
    with bfloat16_autocast():
        guarded = error()
    torch.testing.assert_close(guarded, exact, rtol=0.01, atol=1e-9)


def test_the_autocast_is_back_after_the_forward():
    x, y = batch()
    with bfloat16_autocast():
        triplet_error(smooth_net(), x, y, EPS)
        assert torch.is_autocast_enabled("cpu")
        assert smooth_net()(x).dtype is torch.bfloat16


def test_the_mode_of_the_network_is_left_alone():
    x, y = images(8)
    model = conv_net()
    triplet_error(model, x, y, EPS)
    assert all(module.training for module in model.modules())
    triplet_error(model.eval(), x, y, EPS)
    assert not any(module.training for module in model.modules())


def test_the_misalignment_of_an_affine_binary_loss_is_zero():
    """With two classes the gradient of the cross-entropy keeps its direction w_0 - w_1 everywhere."""
    x, y = batch(classes=2)
    torch.testing.assert_close(
        gradient_misalignment(Affine(classes=2), x, y, EPS), torch.zeros(6, dtype=torch.double), rtol=0, atol=1e-6
    )


def test_the_misalignment_of_a_reversed_gradient_is_two():
    """The gradient of the loss of |x| turns round where x changes its sign."""

    def model(x):
        return torch.cat([x.abs(), torch.zeros_like(x)], 1)

    torch.manual_seed(0)
    x = torch.full((200, 1), 1e-3)
    found = gradient_misalignment(model, x, torch.zeros(200, dtype=torch.long), 1.0)
    assert set(found.round().tolist()) == {0.0, 2.0}


def test_the_misalignment_is_undefined_where_a_gradient_is_zero():
    x, y = batch()
    model = Affine()
    torch.nn.init.zeros_(model.weight)
    assert gradient_misalignment(model, x, y, EPS).isnan().all()


def test_the_misalignment_works_under_no_grad():
    x, y = batch()
    with torch.no_grad():
        assert gradient_misalignment(smooth_net(), x, y, EPS).isfinite().all()


def test_the_misalignment_leaves_no_gradient_on_the_parameters():
    x, y = batch()
    model = smooth_net()
    gradient_misalignment(model, x, y, EPS)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("share", "count"), [(1.0, 8), (0.5, 4), (0.25, 2), (0.01, 1)])
@pytest.mark.parametrize("form", ["triplet", "2p", "5-point"])
def test_a_share_of_the_batch_is_its_first_images_alone(share, count, form):
    model = smooth_net()
    x, y = torch.rand(8, 12), torch.arange(8) % 4
    adversarial = (x + 0.1, model(x + 0.1))
    torch.manual_seed(1)
    some = Linearity(share=share, form=form)(model, x, y, 0.1, adversarial=adversarial)
    torch.manual_seed(1)
    first = (adversarial[0][:count], adversarial[1][:count])
    torch.testing.assert_close(some, Linearity(form=form)(model, x[:count], y[:count], 0.1, adversarial=first))


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        Linearity(share=share)
