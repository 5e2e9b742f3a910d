"""Square (Andriushchenko et al., arXiv 1912.00049): random squares, kept when they lower the margin; no gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from elle.evaluation.autoattack import noise
from elle.evaluation.autoattack.norms import Norm, inside, length, per_image, unit
from elle.evaluation.autoattack.objectives import violation
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.autoattack.slots import Slots, blank, replace_rows
from elle.evaluation.autoattack.windows import Windows, bump, tiling, window_plan

_INSIDE_L1 = 1 - 1e-6


@dataclass
class SquareSlots(Slots):
    query: Tensor
    """Index of the window to try next [S]."""
    key: Tensor
    x_best: Tensor
    value_best: Tensor
    """The largest violation so far [S]."""


class Square:
    """One item a point. The windows of a query are the same for all points, as in the original."""

    variants = 1
    interval = 25

    def __init__(
        self, oracle: Oracle, x: Tensor, y: Tensor, eps: float, norm: Norm, *, seed: int, queries: int
    ) -> None:
        self.oracle, self.x, self.y, self.eps, self.norm, self.seed = oracle, x, y, eps, norm, seed
        self.questions = queries + 1
        self.channels, height, width = x.shape[1:]
        self.tile, self.pattern, self.tiles = tiling(height, width, norm, seed, x.device)
        self.windows: Windows = window_plan(queries, self.channels, (height, width), norm, seed, x.device)

    def start(self, point: Tensor, variant: Tensor) -> SquareSlots:
        x = self.x[point]
        key = noise.keys(self.seed, 1, point)
        x_adv = self._started(x, key)
        value = torch.full((len(x),), float("-inf"), device=x.device)
        common = blank(x, self.y[point], x_adv, self.questions)
        return SquareSlots(**common, query=torch.zeros_like(point), key=key, x_best=x_adv.clone(), value_best=value)

    def _started(self, x: Tensor, key: Tensor) -> Tensor:
        """linf: vertical stripes of +-eps; l2 and l1: a tiling of bumps with random signs."""
        if self.norm == "linf":
            return (x + self.eps * noise.signs(key, (self.channels, 1, x.shape[-1]))).clamp(0, 1)
        delta = self.pattern * noise.signs(key, (self.channels, self.tiles))[:, :, self.tile]
        if self.norm == "l2":
            return (x + self.eps * unit(delta, "l2")).clamp(0, 1)
        return inside(x + delta, x, self._radius(x), "l1")

    def step(self, slots: SquareSlots) -> None:
        logits = self.oracle.logits(slots.x_adv)
        value = violation(logits, slots.y)
        slots.note(logits, torch.ones_like(slots.y, dtype=torch.bool), self.oracle.doubt(logits))
        better = value > slots.value_best
        replace_rows(slots.x_best, better, slots.x_adv)
        replace_rows(slots.value_best, better, value)
        slots.x_adv.copy_(self._proposal(slots))
        slots.query.add_(1).clamp_(max=self.questions - 2)
        slots.left.sub_(1).clamp_(min=0)

    def _proposal(self, slots: SquareSlots) -> Tensor:
        x, x_best = slots.x, slots.x_best
        if self.norm == "linf":
            row = self.windows.at(slots.query)
            mask = row.mask(x)
            change = 2 * self.eps * row.sign.view(-1, self.channels, 1, 1) * mask
            return inside(x_best + change, x, self._radius(x), "linf")
        delta = self._moved_mass(slots)
        if self.norm == "l2":
            return (x + self.eps * unit(delta, "l2")).clamp(0, 1)
        return inside(x + delta, x, self._radius(x), "l1")

    def _moved_mass(self, slots: SquareSlots) -> Tensor:
        """Empty one window; fill another with its own direction plus a bump, to both's mass and what eps spares."""
        row = self.windows.at(slots.query)
        delta = slots.x_best - slots.x
        into, out = row.mask(delta), row.mask(delta, second=True)
        sign = noise.signs(noise.keys(self.seed, 2, slots.key + slots.query), (self.channels, 1, 1))
        own = self._mass(delta * into)
        both = self._mass(delta * torch.maximum(into, out))
        new = bump(row, delta) * sign + delta * into / (own + 1e-12)
        used = per_image(length(delta, self.norm), delta)
        if self.norm == "l2":
            mass = ((self.eps**2 - used.square()).clamp(min=0) / self.channels + both.square()).sqrt()
        else:
            mass = (self.eps - used).clamp(min=0) + both * self.channels
        return torch.where(into > 0, new / (self._mass(new) + 1e-12) * mass, delta * (1 - out))

    def _mass(self, delta: Tensor) -> Tensor:
        """The norm of each channel [S, C, 1, 1]."""
        if self.norm == "l2":
            return delta.square().sum((2, 3), keepdim=True).sqrt()
        return delta.abs().sum((2, 3), keepdim=True)

    def _radius(self, x: Tensor) -> Tensor:
        radius = self.eps * (_INSIDE_L1 if self.norm == "l1" else 1)
        return torch.full((len(x), *[1] * (x.dim() - 1)), radius, device=x.device)
