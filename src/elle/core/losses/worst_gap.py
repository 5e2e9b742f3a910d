"""The loss of LLR: points where the penalty is largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.losses.common import SCALE, InputGradient, When, check_finite, inside, random_point


@dataclass(frozen=True)
class WorstGap:
    """nominal * L(x) + weight * (g + slope * |d^T grad L(x)|), g = max_d |L(x+d) - L(x) - d^T grad L(x)| (LLR).

    The worst d is sought by Adam from a random start, with x + d in [0, 1] (Qin et al., arXiv 1907.02610, Eq. 8; the
    weights are those of its authors' code for CIFAR-10).
    """

    gradient: InputGradient
    steps: int = 10
    rate: float = 0.1
    """Of Adam, in pixels of [0, 1]."""
    nominal: float = 2.0
    """Weight of the cross-entropy at x."""
    weight: float = 4.0
    slope: float = 0.3
    """Weight of the slope beside the gap."""

    def __post_init__(self) -> None:
        check_finite(self, "nominal", "weight", "slope", "rate")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        slope = self.gradient(model, x, y, differentiable=True)
        d = self._worst(model, x, y, eps, slope.detach())
        logits = model(torch.cat([x, x + d])).float()
        here, there = F.cross_entropy(logits, y.repeat(2), reduction="none").chunk(2)
        linear = (d * slope).flatten(1).sum(1)
        loss = self.nominal * here + self.weight * ((there - here - linear).abs() + self.slope * linear.abs())
        return loss.mean(), logits[: len(x)]

    def _worst(self, model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor, slope: Tensor) -> Tensor:
        d = random_point(x, eps) - x
        with torch.no_grad():
            here = F.cross_entropy(model(x).float(), y, reduction="none")
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(1, self.steps + 1):
            with torch.enable_grad():
                d = d.detach().requires_grad_()
                there = F.cross_entropy(model(x + d).float(), y, reduction="none")
                gap = (there - here - (d * slope).flatten(1).sum(1)).abs().sum()
                (gradient,) = torch.autograd.grad(gap * SCALE, d)
            gradient = gradient.nan_to_num() / SCALE
            mean, square = mean.lerp(gradient, 0.1), square.lerp(gradient.square(), 0.001)
            move = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            d = inside(x + d.detach() + self.rate * move, x, eps) - x
        return d
