"""Losses at the points of an attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from elle.core.losses.common import Model, When, check_finite


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy at the adversarial points, averaged over the batch (Madry et al., arXiv 1706.06083)."""

    smoothing: float = 0.0
    """This share of a label is spread over all classes, its own too (Szegedy et al., arXiv 1512.00567)."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be a share from 0 to below 1")

    def __call__(
        self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = model(x_adv).float()
        return F.cross_entropy(logits, y, label_smoothing=self.smoothing), logits


@dataclass(frozen=True)
class Penalised:
    """Cross-entropy at the adversarial points + weight * mean of a penalty that differentiates input gradients.

    An image for which the penalty is undefined (NaN: the angle to a gradient of 0) adds nothing.
    """

    penalty: Callable[..., Tensor]
    """(model, x, y, eps, norm, differentiable=True) -> one value an image"""
    weight: float
    norm: Literal["linf", "l2"] = "linf"

    def __post_init__(self) -> None:
        check_finite(self, "weight")
        if self.norm not in ("linf", "l2"):
            raise ValueError(f"norm is {self.norm!r}; it must be 'linf' or 'l2'")

    def __call__(
        self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When | None = None
    ) -> tuple[Tensor, Tensor]:
        loss, logits = CrossEntropy()(model, x, y, x_adv, eps)
        penalty = self.penalty(model, x, y, eps, self.norm, differentiable=True)
        return loss + self.weight * penalty.float().nan_to_num(nan=0.0).mean(), logits


@dataclass(frozen=True)
class Trades:
    """CE(x) + beta * KL(p(x) || p(x_adv)), averaged over the batch (Zhang et al., arXiv 1901.08573)."""

    beta: float = 6.0

    def __post_init__(self) -> None:
        check_finite(self, "beta")

    def __call__(
        self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When | None = None
    ) -> tuple[Tensor, Tensor]:
        clean, logits = model(x).float(), model(x_adv).float()
        divergence = F.kl_div(F.log_softmax(logits, 1), F.softmax(clean, 1), reduction="batchmean")
        return F.cross_entropy(clean, y) + self.beta * divergence, logits


@dataclass(frozen=True)
class VertexMix:
    """Soft cross-entropy at a random point between x and the vertex x + gamma (x_adv - x) (AdvMixUp, arXiv 2003.02484).

    The mixing share is uniform for each image, Beta(1, 1); the label is mixed with it between two smoothed ones.
    """

    gamma: float = 2.0
    at_image: float = 1.0
    """Probability of the true class at x; the other classes share the rest."""
    at_vertex: float = 0.1
    """The same at the vertex."""

    def __post_init__(self) -> None:
        for name in ("at_image", "at_vertex"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a probability from 0 to 1")
        check_finite(self, "gamma")

    def __call__(
        self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When | None = None
    ) -> tuple[Tensor, Tensor]:
        share = torch.rand(len(x), device=x.device, dtype=x.dtype)
        vertex = (x + self.gamma * (x_adv - x)).clamp(0, 1)
        logits = model(vertex.lerp(x, share.view(-1, *[1] * (x.dim() - 1)))).float()
        true = (share * self.at_image + (1 - share) * self.at_vertex).unsqueeze(1)
        other = (1 - true) / (logits.shape[1] - 1)
        own = y.unsqueeze(1) == torch.arange(logits.shape[1], device=y.device)
        target = torch.where(own, true, other)
        return F.cross_entropy(logits, target), logits
