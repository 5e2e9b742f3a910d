"""The three balls: lengths, projections on ball and box, and the last correction before a point counts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["linf", "l2", "l1"]

_HALVINGS = 32


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """One value an image [B], shaped to be combined with images [B, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def length(delta: Tensor, norm: Norm) -> Tensor:
    """The norm of each image's perturbation [B]."""
    delta = delta.flatten(1)
    if norm == "linf":
        return delta.abs().amax(1)
    return delta.square().sum(1).sqrt() if norm == "l2" else delta.abs().sum(1)


def unit(delta: Tensor, norm: Norm) -> Tensor:
    """Each image's perturbation divided by its norm; a zero one stays zero."""
    # By the largest entry first: the square of a tiny gradient is 0 in float32.
    delta = delta / per_image(length(delta, "linf").clamp(min=1e-38), delta)
    return delta / per_image(length(delta, norm).clamp(min=1e-12), delta)


def inside(x_adv: Tensor, x: Tensor, radius: Tensor, norm: Norm) -> Tensor:
    """x_adv brought into the ball of `radius` [B, 1, ...] around x and into [0, 1].

    For linf and l1 this is the nearest point of both; for l2 the ball first and then the box, as AutoAttack does.
    """
    if norm == "linf":
        return torch.clamp(x_adv, x - radius, x + radius).clamp(0, 1)
    if norm == "l2":
        delta = x_adv - x
        shrink = (radius / per_image(length(delta, "l2").clamp(min=1e-12), x)).clamp(max=1)
        return (x + delta * shrink).clamp(0, 1)
    return _inside_l1(x_adv, x, radius)


def _inside_l1(x_adv: Tensor, x: Tensor, radius: Tensor) -> Tensor:
    """The nearest point keeps min(max(|delta| - level, 0), room to the box); the level is found by bisection."""
    delta = (x_adv - x).flatten(1)
    size, start, limit = delta.abs(), x.flatten(1), radius.view(-1, 1)
    room = torch.where(delta > 0, 1 - start, start)

    def kept(level: Tensor) -> Tensor:
        return torch.minimum((size - level).clamp(min=0), room)

    low = torch.zeros_like(size[:, :1])
    high = size.amax(1, keepdim=True)
    fits = kept(low).sum(1, keepdim=True) <= limit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = kept(middle).sum(1, keepdim=True) > limit
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    level = torch.where(fits, torch.zeros_like(high), high)
    return (x + (kept(level) * delta.sign()).view_as(x)).clamp(0, 1)


def settled(x_adv: Tensor, x: Tensor, eps: float, norm: Norm) -> Tensor:
    """x_adv with the roundings of a search taken off, so that it lies in ball and box to float32's last digit."""
    if norm == "linf":
        return torch.clamp(x_adv, x - eps, x + eps).clamp(0, 1)
    delta = (x_adv.clamp(0, 1) - x).double()
    shrink = (eps / length(delta, norm).clamp(min=1e-30)).clamp(max=1)
    return (x + (delta * per_image(shrink, x)).to(x.dtype)).clamp(0, 1)
