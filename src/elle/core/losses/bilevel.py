"""The loss of Fast-BAT: points that carry a gradient of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.losses.common import SCALE, InputGradient, When, check_finite, inside, random_point


@dataclass(frozen=True)
class Bilevel:
    """Cross-entropy at points found by plain gradient steps, and the gradient of those points (Fast-BAT).

    The last step minimises a linear model with a quadratic term of weight lambda, so that d x_adv / d theta is known:
    the loss gains (1/lambda) <grad L(x_z), m * grad L(x_adv)> differentiated in the first factor only, with m = 1 for
    coordinates strictly inside the ball and [0, 1] (Zhang et al., arXiv 2112.12376, Eq. 10).
    """

    gradient: InputGradient
    rate: float = 5000 / 255
    steps: int = 2
    weight: float = 10.0
    """lambda"""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}; it must be a finite number above 0")
        check_finite(self, "rate")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        points = random_point(x, eps)
        for step in range(self.steps):
            slope = self.gradient(model, points, y, differentiable=step == self.steps - 1)
            aim = points + self.rate * slope.detach()
            points = inside(aim, x, eps)
        with torch.enable_grad():
            points.requires_grad_()
            logits = model(points).float()
            loss = F.cross_entropy(logits, y)
            (outer,) = torch.autograd.grad(loss * SCALE * len(x), points, retain_graph=True)
        # Judged before the projection: rounded, (x + eps) - x is often below eps.
        free = ((aim - x).abs() < eps) & (aim > 0) & (aim < 1)
        implicit = (slope * (outer * free / SCALE).detach()).sum() / (self.weight * len(x))
        # Its gradient counts, its value does not.
        return loss + implicit - implicit.detach(), logits
