"""Training losses: (model, x, y, x_adv, eps) -> loss, logits at the points the method trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy at the adversarial points, averaged over the batch (Madry et al., arXiv 1706.06083)."""

    def __call__(self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x_adv).float()
        return F.cross_entropy(logits, y), logits


@dataclass(frozen=True)
class Penalised:
    """Cross-entropy at the adversarial points + weight * mean of a penalty that differentiates input gradients.

    An image for which the penalty is undefined (NaN: the angle to a gradient of 0) adds nothing.
    """

    penalty: Callable[..., Tensor]
    """(model, x, y, eps, differentiable=True) -> one value an image"""
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}; it must be a finite number, 0 or more")

    def __call__(self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = CrossEntropy()(model, x, y, x_adv, eps)
        penalty = self.penalty(model, x, y, eps, differentiable=True)
        return loss + self.weight * penalty.float().nan_to_num(nan=0.0).mean(), logits


@dataclass(frozen=True)
class Trades:
    """CE(x) + beta * KL(p(x) || p(x_adv)), averaged over the batch (Zhang et al., arXiv 1901.08573)."""

    beta: float = 6.0

    def __call__(self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor]:
        clean, logits = model(x).float(), model(x_adv).float()
        divergence = F.kl_div(F.log_softmax(logits, 1), F.softmax(clean, 1), reduction="batchmean")
        return F.cross_entropy(clean, y) + self.beta * divergence, logits
