"""The losses of GAT and NuAT: an attack that climbs what the loss penalises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.losses.common import SCALE, When, check_finite, inside

Held = Callable[[nn.Module], contextlib.AbstractContextManager[None]]
"""(network) -> a context in which it is in eval mode, as `attacks.network.in_eval_mode`"""


@dataclass(frozen=True)
class Guided:
    """CE + weight * distance(f(x), f(x_adv)), x_adv one step up the same sum from a random corner (GAT, NuAT).

    GAT: the squared l2 distance of the softmax outputs (arXiv 2011.14969); NuAT: the nuclear norm of the
    difference of the batch's logits, divided by B (Sriramanan et al., NeurIPS 2021).
    """

    held: Held
    distance: Literal["softmax", "nuclear"] = "softmax"
    weight: float = 10.0
    start: float = 1.0
    """The corner's distance from x, in units of eps."""
    alpha: float = 1.0
    """The step, in units of eps."""
    clean: bool = False
    """Take the cross-entropy at x, as the authors of GAT and NuAT do, instead of x_adv."""
    alternate: bool = False
    """Leave the distance out of the attack at every other step."""
    late: float = 1.0
    """The weight's factor in the last 14 % of the training (epoch 86 of the authors' 100)."""
    ramp: bool = False
    """Let the weight grow linearly from 0 over the first 90 % of the training."""
    project: bool = True
    """Hold the attacked point to the eps-ball; the ELLE paper's code for GAT lets it go, to 2 eps."""
    eval_mode: bool = True
    """Attack in eval mode; that code attacks in train mode, where each forward moves BatchNorm's statistics."""
    corner: bool = False
    """Train on what the attack maximises at the corner as well; that code does, by not clearing its gradient."""

    def __post_init__(self) -> None:
        if self.distance not in ("softmax", "nuclear"):
            raise ValueError(f"distance is {self.distance!r}; it must be 'softmax' or 'nuclear'")
        check_finite(self, "weight", "start", "alpha", "late")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        steps, share = when
        weight = self.weight * torch.where(share < 0.86, 1.0, self.late)
        if self.ramp:
            weight = weight * (share / 0.9).clamp(max=1)
        guide = weight * (steps % 2 if self.alternate else 1)
        with self.held(model) if self.eval_mode else contextlib.nullcontext():
            points, objective = self._attacked(model, x, y, eps, guide)
        # Two forwards, as published: BatchNorm normalises clean and adversarial images apart.
        there, here = model(points).float(), model(x).float()
        loss = F.cross_entropy(here if self.clean else there, y)
        loss = loss + weight * self._distance(here, there)
        return (loss + objective if self.corner else loss), there

    def _attacked(
        self, model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor, guide: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The point, and what was maximised there, at its corner."""
        with torch.set_grad_enabled(self.corner):
            here = model(x).float()
        corner = x + self.start * eps * torch.sign(torch.rand_like(x) - 0.5)
        with torch.enable_grad():
            corner = corner.clamp(0, 1).requires_grad_()
            logits = model(corner).float()
            objective = F.cross_entropy(logits, y) + guide * self._distance(here, logits)
            (gradient,) = torch.autograd.grad(objective * SCALE * len(x), corner, retain_graph=self.corner)
        points = corner.detach() + self.alpha * eps * gradient.nan_to_num().sign()
        return inside(points, x, eps) if self.project else points.clamp(0, 1), objective

    def _distance(self, here: Tensor, there: Tensor) -> Tensor:
        if self.distance == "nuclear":
            return nuclear_norm(there - here) / len(here)
        return (F.softmax(here, 1) - F.softmax(there, 1)).square().sum(1).mean()


def nuclear_norm(matrix: Tensor) -> Tensor:
    """The sum of the singular values of [B, K]; its gradient is the polar factor.

    <P, M> with P the polar factor of M, found by Newton-Schulz iteration: no decomposition, so nothing waits for the
    device, and the gradient stays finite where singular values coincide or vanish.
    """
    with torch.no_grad(), torch.autocast(matrix.device.type, enabled=False):
        factor = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
        # By its largest entry first: the squares of small entries vanish.
        factor = factor / factor.abs().amax().clamp(min=torch.finfo(factor.dtype).tiny)
        factor = factor / torch.linalg.vector_norm(factor).clamp(min=1)
        for _ in range(40):  # each brings a small singular value 1.5 times closer to 1
            factor = 1.5 * factor - 0.5 * factor @ (factor.mT @ factor)
        factor = factor if matrix.shape[0] >= matrix.shape[1] else factor.mT
    norm: Tensor = (factor * matrix).sum()
    return norm
