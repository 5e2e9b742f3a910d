"""Linearity measured by gradients of the loss with respect to the image; as penalties, by double backpropagation.

Those that differentiate such a gradient keep its graph only with `differentiable=True`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elle.core.linearity.points import (
    Model,
    Norm,
    cross_entropy,
    logits_with_ten_mantissa_bits,
    summed,
    uniform_in_ball,
)


def input_gradient(model: Model, x: Tensor, y: Tensor, differentiable: bool = False) -> Tensor:
    """The gradient of each image's loss with respect to that image, [B, ...]."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        loss = cross_entropy(logits_with_ten_mantissa_bits(model, x), y).sum()
        # Scaled on the way (by a power of two: exactly), which keeps half-precision gradients off zero.
        (gradient,) = torch.autograd.grad(loss * 512, x, create_graph=differentiable)
    return gradient / 512


def gradient_misalignment(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    norm: Norm = "linf",
    differentiable: bool = False,
    gradient: Tensor | None = None,
) -> Tensor:
    """1 - cos(grad L(x), grad L(x + eta)), eta ~ Unif(ball) (Eq. 5, GradAlign); NaN where a gradient is 0.

    The first gradient is a constant for differentiation, as in GradAlign's own code; `gradient`, where it is known.
    """
    g = (input_gradient(model, x, y) if gradient is None else gradient).flatten(1).double()
    h = input_gradient(model, x + uniform_in_ball(x, eps, norm), y, differentiable).flatten(1).double()
    lengths = g.square().sum(1) * h.square().sum(1)
    undefined = lengths == 0
    # Replaced before the root, whose derivative at 0 would make every gradient NaN.
    cosine = (g * h).sum(1) / torch.where(undefined, 1, lengths).sqrt()
    return torch.where(undefined, torch.nan, 1 - cosine)


def finite_difference_misalignment(
    model: Model, x: Tensor, y: Tensor, eps: float | Tensor, norm: Norm = "linf"
) -> Tensor:
    """Eq. 8: misalignment from loss differences along two Gaussian directions; NaN where the loss does not change.

    Its gradient is 0 almost everywhere: a metric, not a penalty.
    """
    shifted = x + uniform_in_ball(x, eps, norm)
    u, v = (torch.randn(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    sigma = 1e-3
    points = torch.cat([x + sigma * u, x, shifted + sigma * v, shifted])
    loss = cross_entropy(logits_with_ten_mantissa_bits(model, points), y.repeat(4))
    near, here, far, there = loss.chunk(4)
    u, v = u.flatten(1), v.flatten(1)
    cosine = (u * v).sum(1) / (u.square().sum(1) * v.square().sum(1)).sqrt()
    agreement = torch.sign(near - here) * torch.sign(far - there)
    # A difference of 0 has no direction: a constant classifier is not misaligned by 1.
    return torch.where(agreement == 0, torch.nan, 1 - agreement * cosine)


def directional_curvature(model: Model, x: Tensor, y: Tensor, eps: float | Tensor, norm: Norm = "linf") -> Tensor:
    """v^T H v of the loss at x, v = x_a - x_b with both ends uniform in the ball (Definition 2), by double backward."""
    v = uniform_in_ball(x, eps, norm) - uniform_in_ball(x, eps, norm)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        slope = (input_gradient(model, x, y, differentiable=True) * v).sum()
        if not slope.requires_grad:  # a loss that is affine in x has no second derivative to ask for
            return torch.zeros(len(x), device=x.device, dtype=x.dtype)
        (product,) = torch.autograd.grad(slope, x, materialize_grads=True)
    return (product * v).flatten(1).sum(1)


def taylor_gap(
    model: Model, x: Tensor, y: Tensor, eps: float | Tensor, norm: Norm = "linf", differentiable: bool = False
) -> Tensor:
    """(L(x + d) - L(x) - d^T grad L(x))^2, d ~ Unif(ball): LLR's term in the paper's form (Proposition 3)."""
    d = uniform_in_ball(x, eps, norm)
    gradient = input_gradient(model, x, y, differentiable)
    loss = cross_entropy(logits_with_ten_mantissa_bits(model, torch.cat([x + d, x])), y.repeat(2))
    there, here = loss.chunk(2)
    return (there - here - (d * gradient).flatten(1).sum(1)).square()


def gradient_difference(
    model: Model, x: Tensor, y: Tensor, eps: float | Tensor, norm: Norm = "linf", differentiable: bool = False
) -> Tensor:
    """||grad L(x) - grad L(x_FGSM)||^2, x_FGSM = x + eps sign(grad L(x)): CURE's term (its l2 form for norm l2).

    The first gradient is a constant for differentiation, as in the paper's own code.
    """
    g = input_gradient(model, x, y)
    direction = g.sign()
    if norm == "l2":
        # By a power of two first, which rounds nothing: the square of a confident network's gradient is 0 in float32.
        _, exponent = torch.frexp(g.abs().amax(tuple(range(1, x.dim())), keepdim=True))
        scaled = torch.ldexp(g, (-exponent).clamp(max=100))
        direction = scaled / summed(scaled.square(), x).sqrt().clamp(min=1e-30)
    h = input_gradient(model, x + eps * direction, y, differentiable)
    return (g - h).square().flatten(1).sum(1)


def gradient_norm(
    model: Model, x: Tensor, y: Tensor, eps: float | Tensor = 0.0, norm: Norm = "linf", differentiable: bool = False
) -> Tensor:
    """||grad L(x)||_2, the penalty of Ross & Doshi-Velez and Simon-Gabriel et al.; the ball plays no part."""
    length: Tensor = torch.linalg.vector_norm(input_gradient(model, x, y, differentiable).flatten(1), dim=1)
    return length
