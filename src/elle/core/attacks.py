"""Attacks: (model, x, y, eps) -> x_adv. One loop of normalised gradient steps serves every name.

The model is used in the mode it is in. In train mode each forward moves BatchNorm's running statistics, as in
the paper's training; call `model.eval()` first to attack a fixed model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Literal["linf", "l2"]

# Only the gradient's direction is used, so its scale is free: this one keeps half-precision gradients off zero.
_SCALE = 512.0


@dataclass(frozen=True)
class SignStep:
    """`steps` normalised gradient steps up the cross-entropy from a random start; lengths in units of eps."""

    alpha: float = 1.0
    steps: int = 1
    noise: float = 0.0
    """Start at a random point of the ball of radius noise * eps."""
    project: bool = True
    """Return to the eps-ball after each step."""
    clip: bool = False
    """Return to [0, 1] after each step."""
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        if self.norm not in ("linf", "l2"):
            raise ValueError(f"norm is {self.norm!r}; it must be 'linf' or 'l2'")

    def __call__(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, eps: float | Tensor) -> Tensor:
        """Adversarial points for x [B, ...], detached; parameters' `.grad` is not touched."""
        x = x.detach()
        x_adv = x
        if self.noise:
            x_adv = self._inside(x + self.noise * eps * _random_direction(x, self.norm), x, eps)
        for _ in range(self.steps):
            step = _normalised(_gradient(model, x_adv, y), self.norm)
            x_adv = self._inside(x_adv + self.alpha * eps * step, x, eps)
        return x_adv

    def _inside(self, x_adv: Tensor, x: Tensor, eps: float | Tensor) -> Tensor:
        if self.project:
            x_adv = x + _projected(x_adv - x, eps, self.norm)
        return x_adv.clamp(0, 1) if self.clip else x_adv


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    clip: bool = False,
    norm: Norm = "linf",
) -> Tensor:
    """x + eps * sign(grad L(x)) (Goodfellow et al., arXiv 1412.6572), not clipped unless asked, as in the paper."""
    return SignStep(clip=clip, norm=norm)(model, x, y, eps)


def n_fgsm(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, eps: float | Tensor, *, noise: float = 2) -> Tensor:
    """x + eta + eps * sign(grad L(x + eta)), eta ~ Unif(+-noise * eps), unprojected (arXiv 2202.01181)."""
    return SignStep(noise=noise, project=False)(model, x, y, eps)


def pgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 20,
    alpha: float | None = None,
    norm: Norm = "linf",
) -> Tensor:
    """PGD from a uniform start, inside the ball and [0, 1]; alpha in units of eps, 2.5 / steps by default."""
    alpha = 2.5 / steps if alpha is None else alpha
    return SignStep(alpha=alpha, steps=steps, noise=1, clip=True, norm=norm)(model, x, y, eps)


def _gradient(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(model(x).float(), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss * _SCALE, x)
    return gradient.nan_to_num()


def _random_direction(x: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return 2 * torch.rand_like(x) - 1
    radius = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device, dtype=x.dtype)
    return _normalised(torch.randn(x.shape, dtype=x.dtype, device=x.device), norm) * radius


def _normalised(gradient: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return gradient.sign()
    # Scaled by its largest entry first: the square of a confident network's gradient is 0 in float32.
    gradient = gradient / gradient.abs().amax(tuple(range(1, gradient.dim())), keepdim=True).clamp(min=1e-38)
    return gradient / _length(gradient)


def _projected(delta: Tensor, eps: float | Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return delta.clamp(-eps, eps)  # type: ignore[arg-type]  # a number or a tensor, both ends alike
    return delta * (eps / _length(delta)).clamp(max=1)


def _length(delta: Tensor) -> Tensor:
    """The l2 norm of each image, shaped to divide them by; never 0."""
    return delta.square().sum(tuple(range(1, delta.dim())), keepdim=True).sqrt().clamp(min=1e-30)
