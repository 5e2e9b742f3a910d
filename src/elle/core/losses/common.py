"""What several losses share: the time, points in the ball and in [0, 1], a scale, and checks of their fields."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]
When = tuple[Tensor, Tensor]
"""(steps done, share of the training done), for losses that change in time"""

InputGradient = Callable[..., Tensor]
"""(model, x, y, differentiable=False) -> the gradient of each image's cross-entropy, as `linearity.input_gradient`"""

# A gradient whose sign alone is used may be scaled: this keeps half-precision gradients off zero.
SCALE = 512.0


def check_finite(part: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(part, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(part, name)}; it must be a finite number, 0 or more")


def random_point(x: Tensor, eps: float | Tensor) -> Tensor:
    return inside(x + (2 * torch.rand_like(x) - 1) * eps, x, eps)


def inside(points: Tensor, x: Tensor, eps: float | Tensor) -> Tensor:
    return (x + (points - x).clamp(-eps, eps)).clamp(0, 1).detach()  # type: ignore[arg-type]
