"""Local-linearity errors of the loss inside a ball; a regulariser and a metric are the same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Literal["linf", "l2"]
Criterion = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each image: logits [B, K], y [B] -> [B]."""
    return F.cross_entropy(logits, y, reduction="none")


def uniform_in_ball(x: Tensor, eps: float | Tensor, norm: Norm = "linf") -> Tensor:
    """Offsets drawn uniformly from the ball of radius eps, one for each image of x [B, ...]."""
    if norm == "linf":
        # Not uniform_ or randn_like: torch.compile (2.13, aot_eager) takes two such draws for the same value.
        return (2 * torch.rand_like(x) - 1) * eps
    if norm == "l2":
        # A Gaussian direction and the radius U^(1/d): the volume inside radius r grows as r^d.
        direction = torch.randn(x.shape, dtype=x.dtype, device=x.device)
        axes = tuple(range(1, x.dim()))
        length = direction.square().sum(axes, keepdim=True).sqrt()
        radius = torch.rand_like(length) ** (1 / x[0].numel())
        return direction / length * radius * eps
    raise ValueError(f"norm is {norm!r}; it must be 'linf' or 'l2'")


@dataclass(frozen=True)
class Triplet:
    """The local, linear approximation error of the loss at three points of the ball (Definition 1, Algorithm 1).

    x_a, x_b ~ Unif(ball(x, eps)), x_c = (1-a) x_a + a x_b, a ~ Unif[0, 1] for each image:
    E = (L(x_c) - (1-a) L(x_a) - a L(x_b))^2
    """

    samples: int = 1
    """Triplets drawn for each image; their errors are averaged."""
    alpha: Literal["uniform"] | float = "uniform"
    """Position of x_c on the segment: drawn for each image, or fixed."""
    norm: Norm = "linf"
    clip: bool = False
    """Keep the points in [0, 1]: the paper does on ImageNet, not on CIFAR and SVHN."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be at least 1")
        if self.alpha != "uniform" and not (isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha is {self.alpha!r}; it must be 'uniform' or a number from 0 to 1")
        if self.norm not in ("linf", "l2"):
            raise ValueError(f"norm is {self.norm!r}; it must be 'linf' or 'l2'")

    def __call__(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        eps: float | Tensor,
        criterion: Criterion = cross_entropy,
    ) -> Tensor:
        """The error of each image, [B]; its mean over the batch is the regulariser."""
        images = len(x)
        x = x.repeat(self.samples, *[1] * (x.dim() - 1))
        x_a, x_b = x + uniform_in_ball(x, eps, self.norm), x + uniform_in_ball(x, eps, self.norm)
        if self.clip:
            x_a, x_b = x_a.clamp(0, 1), x_b.clamp(0, 1)
        a = torch.rand(len(x), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        if self.alpha != "uniform":
            a = torch.full_like(a, self.alpha)
        position = a.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        x_c = (1 - position) * x_a + position * x_b
        # One forward of all points: BatchNorm sees them as one batch, and the device is used better.
        points, labels = torch.cat([x_a, x_b, x_c]), y.repeat(3 * self.samples)
        loss = criterion(_logits_with_ten_mantissa_bits(model, points), labels)
        if loss.shape != labels.shape:
            raise ValueError(
                f"criterion returned shape {tuple(loss.shape)}; it must return one loss for each image "
                f"(for example torch.nn.CrossEntropyLoss(reduction='none'))"
            )
        loss_a, loss_b, loss_c = loss.chunk(3)
        gap = loss_c - (1 - a) * loss_a - a * loss_b
        return gap.square().view(self.samples, images).mean(0)


triplet_error = Triplet()


def _logits_with_ten_mantissa_bits(model: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """float32 logits; leaves a bf16 autocast for the forward.

    The error is a difference of nearly equal losses: bf16's 7 mantissa bits add a floor above the signal,
    while fp16 and TF32, with 10, do not.
    """
    device = points.device.type
    dtype = torch.get_autocast_dtype(device)
    enabled = torch.is_autocast_enabled(device) and dtype is not torch.bfloat16
    with torch.autocast(device, dtype=dtype, enabled=enabled):
        logits = model(points)
        return logits if logits.dtype is torch.float64 else logits.float()


def gradient_misalignment(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, eps: float | Tensor, norm: Norm = "linf"
) -> Tensor:
    """1 - cos(grad L(x), grad L(x + eta)), eta ~ Unif(ball), for each image (Eq. 5); NaN where a gradient is 0."""
    gradients = []
    for point in (x, x + uniform_in_ball(x, eps, norm)):
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            loss = cross_entropy(model(point).float(), y).sum()
            gradients.append(torch.autograd.grad(loss, point)[0].flatten(1).double())
    g, h = gradients
    return 1 - (g * h).sum(1) / (g.square().sum(1) * h.square().sum(1)).sqrt()
