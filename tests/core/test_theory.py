"""The paper's propositions and example, checked on functions whose derivatives are known exactly."""

import math

import pytest
import torch
from torch import Tensor, nn

from elle.core import linearity
from elle.core.linearity import Linearity, uniform_in_ball

from ..networks import smooth_net

DIMENSION, EPS = 6, 0.3


class Polynomial(nn.Module):
    """b.x + x^T A x + (w.x)^3 + (u.x)^5, [B, d] -> [B, 1], in double; its derivatives are written out below."""

    def __init__(self, cubic: float = 1.0, quintic: float = 0.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.b, self.w, self.u = (torch.randn(DIMENSION, generator=draw, dtype=torch.float64) for _ in range(3))
        matrix = torch.randn(DIMENSION, DIMENSION, generator=draw, dtype=torch.float64)
        self.A = matrix + matrix.T
        self.cubic, self.quintic = cubic, quintic
        self.points: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.points.append(x)
        value = (
            x @ self.b + ((x @ self.A) * x).sum(1) + self.cubic * (x @ self.w) ** 3 + self.quintic * (x @ self.u) ** 5
        )
        return value[:, None]

    def second(self, x: Tensor, v: Tensor) -> Tensor:
        second = 2 * ((v @ self.A) * v).sum(1) + 6 * self.cubic * (x @ self.w) * (v @ self.w) ** 2
        return second + 20 * self.quintic * (x @ self.u) ** 3 * (v @ self.u) ** 2

    def third(self, v: Tensor) -> Tensor:
        return 6 * self.cubic * (v @ self.w) ** 3


class AsLoss(nn.Module):
    """A network whose cross-entropy for class 0 is exactly the positive function given."""

    def __init__(self, function: nn.Module, offset: float = 20.0) -> None:
        super().__init__()
        self.function, self.offset = function, offset

    def forward(self, x: Tensor) -> Tensor:
        value = self.function(x)[:, 0] + self.offset
        return torch.stack([torch.zeros_like(value), torch.log(torch.expm1(value))], dim=1)


def own_value(values: Tensor, y: Tensor) -> Tensor:
    return values[:, 0]


def inputs(count: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, DIMENSION, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize("a", [0.1, 0.5, 0.8])
def test_proposition_1_holds_with_its_cubic_remainder(a):
    """gap = -a(1-a)/2 D^2 h(x_c) + a(1-a)(1-2a)/6 D^3 h, exactly for a cubic."""
    h, (x, y) = Polynomial(), inputs()
    error = Linearity(alpha=a, power=1)(h, x, y, EPS, own_value)
    x_a, x_c, x_b = h.points[0].chunk(3)
    v = x_a - x_b
    expected = -a * (1 - a) / 2 * h.second(x_c, v) + a * (1 - a) * (1 - 2 * a) / 6 * h.third(v)
    torch.testing.assert_close(error, expected.abs(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("cubic", "quintic"), [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_proposition_2_holds_with_one_sixteenth(cubic, quintic):
    """The 5-point stencil is D^2 h(x_d) / 16 for every polynomial of degree 5; the paper's 1/25 is a slip."""
    h, (x, y) = Polynomial(cubic, quintic), inputs()
    form = Linearity(form="5-point", power=1)
    x_a, x_b, _ = drawn = form.draw(x, EPS)
    error = form(h, x, y, EPS, own_value, drawn=drawn)
    torch.testing.assert_close(error, h.second((x_a + x_b) / 2, x_a - x_b).abs() / 16, rtol=1e-9, atol=1e-12)


def test_proposition_3_holds_on_a_quadratic():
    """LLR's gap is D^2 h(x) / 2 along the offset."""
    h, (x, y) = Polynomial(cubic=0), inputs()
    torch.manual_seed(3)
    gap = linearity.taylor_gap(AsLoss(h), x, y, EPS)
    torch.manual_seed(3)
    d = uniform_in_ball(x, EPS)
    torch.testing.assert_close(gap, (h.second(x, d) / 2).square(), rtol=1e-6, atol=1e-12)


def test_example_1_is_not_linear_although_its_2p_error_is_zero():
    w1, w2, v = torch.tensor([[-1.0, -1.0], [0.0, -1.5], [2.0, -1.0]], dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.where(x @ v >= 0, x @ w1, x @ w2)[:, None]

    x = torch.full((200, 2), 0.5, dtype=torch.float64)
    y = torch.zeros(200, dtype=torch.int64)
    x_fgsm = x + 0.5 * torch.sign(w1)
    torch.manual_seed(0)
    assert Linearity(form="2p", power=1)(f, x, y, 0.5, own_value, (x_fgsm, f(x_fgsm))).max() < 1e-12
    assert Linearity(power=1)(f, x, y, 0.5, own_value).mean() > 1e-3


def test_the_curvature_is_the_second_directional_derivative():
    h, (x, y) = Polynomial(), inputs()
    torch.manual_seed(4)
    found = linearity.directional_curvature(AsLoss(h), x, y, EPS)
    torch.manual_seed(4)
    v = uniform_in_ball(x, EPS) - uniform_in_ball(x, EPS)
    torch.testing.assert_close(found, h.second(x, v), rtol=1e-6, atol=1e-9)


def test_cure_is_the_curvature_along_the_attack():
    h, (x, y) = Polynomial(cubic=0), inputs()
    sign = torch.sign(h.b + 2 * x @ h.A)
    expected = (2 * EPS * sign @ h.A).square().sum(1)
    torch.testing.assert_close(linearity.gradient_difference(AsLoss(h), x, y, EPS), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        linearity.gradient_norm(AsLoss(h), x, y), (h.b + 2 * x @ h.A).norm(dim=1), rtol=1e-6, atol=1e-9
    )


def test_cure_in_l2_of_a_confident_network_is_taken_at_the_ball_not_far_outside():
    """Of a gradient of 1e-22 the square is 0 in float32; divided by that, the point lay beyond all images."""

    class Sure(torch.nn.Module):
        def forward(self, x):
            lead = 60 - 10 * x.flatten(1).sum(1) ** 2
            return torch.stack([0 * lead, -lead], 1)

    x, y = torch.full((3, 4), 0.1), torch.zeros(3, dtype=torch.long)
    exact = linearity.gradient_difference(Sure(), x.double(), y, EPS, "l2")
    assert 0 < exact.min() <= exact.max() < 1e-30
    assert (linearity.gradient_difference(Sure(), x, y, EPS, "l2") < 1e-30).all()


def test_where_the_loss_is_affine_every_metric_is_zero():
    h, (x, y) = Polynomial(cubic=0), inputs()
    h.A = torch.zeros_like(h.A)
    model = AsLoss(h)
    for metric in (
        Linearity(),
        Linearity(form="5-point"),
        Linearity(alpha="max"),
        Linearity(norm="l1"),
        linearity.gradient_misalignment,
        linearity.directional_curvature,
        linearity.taylor_gap,
        linearity.gradient_difference,
    ):
        assert metric(model, x, y, EPS).abs().max() < 1e-9


@pytest.mark.parametrize("curved", [False, True])
def test_the_finite_difference_misalignment_is_equation_8(curved):
    """1 - sign((L(x + su) - L(x)) (L(x' + sv) - L(x'))) cos(u, v), x' in the ball; an affine loss has u.w and v.w."""
    h, (x, y) = Polynomial(cubic=0), inputs(50)
    h.A = h.A * curved
    torch.manual_seed(5)
    found = linearity.finite_difference_misalignment(AsLoss(h, offset=100.0), x, y, 1.0)
    torch.manual_seed(5)
    moved = x + uniform_in_ball(x, 1.0)
    u, v = (torch.randn(x.shape, dtype=x.dtype) for _ in range(2))
    slopes = [(h(point + 1e-3 * way) - h(point))[:, 0] for point, way in ((x, u), (moved, v))]
    agreement = torch.sign(slopes[0] * slopes[1])
    assert torch.equal(agreement, torch.sign((u @ h.b) * (v @ h.b))) is not curved
    torch.testing.assert_close(found, 1 - agreement * nn.functional.cosine_similarity(u, v))


def test_the_worst_alpha_of_a_quadratic_is_its_middle():
    """gap = -a(1-a)/2 D^2 is largest at 1/2, and steps of 0.1 come within 0.1 of it."""
    h, (x, y) = Polynomial(cubic=0), inputs(50)
    worst = Linearity(alpha="max", power=1)(h, x, y, EPS, own_value)
    x_a, _, x_b = h.points[-1].chunk(3)
    largest = h.second(x, x_a - x_b).abs() / 8
    assert (worst <= largest * (1 + 1e-9)).all()
    assert (worst >= 0.95 * largest).all()


def test_the_worst_alpha_is_sought_in_ten_steps_that_stay_between_the_ends():
    """With a kink at 0.95 a step from 0.93 ends beyond x_b, where the gap would grow for ever."""
    seen = []

    def kink(x: Tensor) -> Tensor:
        seen.append(x.detach())
        return (x - 0.95).clamp(min=0)

    x_a, x_b = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    drawn = x_a, x_b, torch.tensor([0.93, 0.5], dtype=torch.float64)
    worst = Linearity(alpha="max", power=1)(kink, x_a, torch.zeros(2, dtype=torch.int64), 1.0, own_value, drawn=drawn)
    assert len(seen) == 1 + 11 + 1  # the ends, the start and the steps, the three points
    assert torch.stack(seen[1:-1]).aminmax() == (0.5, 1)
    torch.testing.assert_close(torch.cat(seen[1:4])[1::2, 0], torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64))
    # Both paths end at x_b, where there is no gap: what counts is the largest on the way.
    torch.testing.assert_close(worst, 0.05 * torch.tensor([0.93, 0.9], dtype=torch.float64))


@pytest.mark.parametrize("on", ["loss", "logits"])
def test_the_worst_alpha_is_never_better_than_the_one_its_search_starts_at(on):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.rand(300, 6), torch.arange(300) % 4
    torch.manual_seed(2)
    drawn = Linearity().draw(x, 0.5)
    start, worst = (Linearity(alpha=alpha, on=on)(net, x, y, 0.5, drawn=drawn) for alpha in ("uniform", "max"))
    assert (worst >= start * (1 - 1e-3)).all()
    assert (worst > 1.1 * start).any()


def test_the_worst_alpha_tells_of_a_point_between_the_ends_where_the_loss_is_no_number():
    def overflowing(x: Tensor) -> Tensor:
        return torch.where((x > 0.6) & (x < 0.9), torch.nan, (x - 0.8).clamp(min=0))

    x_a, x_b = torch.zeros(1, 1), torch.ones(1, 1)
    drawn = x_a, x_b, torch.tensor([0.55])
    found = Linearity(alpha="max")(overflowing, x_a, torch.zeros(1, dtype=torch.int64), 1.0, own_value, drawn=drawn)
    assert found.isnan().all()


def test_points_uniform_in_the_l1_ball_have_the_moments_of_the_uniform_law():
    d, n = 5, 40_000
    torch.manual_seed(0)
    offsets = uniform_in_ball(torch.zeros(n, d), 2.0, "l1")
    radius = offsets.abs().sum(1)
    assert radius.max() <= 2
    assert radius.mean() == pytest.approx(2 * d / (d + 1), rel=0.01)  # r^d is uniform
    assert offsets.abs().mean(0) == pytest.approx([2 / (d + 1)] * d, rel=0.03)
    assert offsets.mean(0).abs().max() < 0.02


def test_the_powers_of_one_gap_agree():
    h, (x, y) = Polynomial(), inputs()
    errors = {}
    for power in (1, 2, "smooth-l1"):
        torch.manual_seed(6)
        errors[power] = Linearity(power=power)(h, x, y, 0.1, own_value)
    torch.testing.assert_close(errors[1].square(), errors[2])
    small = torch.where(errors[1] < 1, errors[2] / 2, errors[1] - 0.5)
    torch.testing.assert_close(errors["smooth-l1"], small)


def test_on_logits_the_gap_is_a_vector_measured_in_l2():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIMENSION, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = inputs()
    points: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, given: points.append(given[0]))
    error = Linearity(alpha=0.25, on="logits", power=1)(model, x, y, EPS)
    h_a, h_c, h_b = model(points[0]).chunk(3)
    torch.testing.assert_close(error, (h_c - 0.75 * h_a - 0.25 * h_b).norm(dim=1))
    linear = nn.Linear(DIMENSION, 4).double()
    assert Linearity(on="logits")(linear, x, y, EPS).max() < 1e-20
    assert Linearity(on="loss")(linear, x, y, EPS).max() > 1e-8


def test_the_2p_form_makes_two_forwards_an_image_and_needs_the_adversarial_one():
    h, (x, y) = Polynomial(), inputs()
    adversarial = (x + EPS, h(x + EPS))
    h.points.clear()
    Linearity(form="2p")(h, x, y, EPS, own_value, adversarial)
    assert sum(map(len, h.points)) == 2 * len(x)
    with pytest.raises(ValueError, match="needs the adversarial points"):
        Linearity(form="2p")(h, x, y, EPS, own_value)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "4-point"},
        {"power": 3},
        {"on": "features"},
        {"form": "5-point", "alpha": 0.5},
        {"form": "2p", "samples": 2},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Linearity(**settings)


PENALTIES = {
    "taylor_gap": linearity.taylor_gap,
    "gradient_norm": lambda model, x, y, eps, **kind: linearity.gradient_norm(model, x, y, **kind),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_double_backpropagation_agrees_with_finite_differences(name):
    model = smooth_net(DIMENSION).double()
    x, y = inputs(4)

    def value() -> Tensor:
        torch.manual_seed(7)
        return PENALTIES[name](model, x, y, 0.1, differentiable=True).sum()

    parameters = list(model.parameters())
    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    check_against_differences(parameters, gradients, value)


def test_misalignment_differentiates_its_second_gradient_alone():
    model = smooth_net(DIMENSION).double()
    x, y = inputs(4)
    parameters = list(model.parameters())
    torch.manual_seed(8)
    misalignment = linearity.gradient_misalignment(model, x, y, 0.1, differentiable=True).sum()
    gradients = torch.autograd.grad(misalignment, parameters, allow_unused=True)
    fixed = linearity.input_gradient(model, x, y)
    torch.manual_seed(8)
    moved = x + uniform_in_ball(x, 0.1)

    def value() -> Tensor:
        return (1 - nn.functional.cosine_similarity(fixed, linearity.input_gradient(model, moved, y))).sum()

    check_against_differences(parameters, gradients, value)


def test_cure_s_difference_differentiates_its_second_gradient_alone():
    model = smooth_net(DIMENSION).double()
    x, y = inputs(4)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(
        linearity.gradient_difference(model, x, y, 0.1, differentiable=True).sum(), parameters, allow_unused=True
    )
    fixed = linearity.input_gradient(model, x, y)

    def value() -> Tensor:
        return (fixed - linearity.input_gradient(model, x + 0.1 * fixed.sign(), y)).square().sum()

    check_against_differences(parameters, gradients, value)


def check_against_differences(parameters, gradients, value) -> None:
    """Central differences along one random direction of all parameters at once."""
    draw, step = torch.Generator().manual_seed(9), 1e-5
    directions = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    found = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += sign * step * d
        ends.append(float(value().detach()))
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p -= sign * step * d
    assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)
    assert abs(found) > 1e-9
    assert math.isfinite(found)
