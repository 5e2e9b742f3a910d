"""Points of a ball, and the loss there: how they are drawn, and how exactly a network's logits must be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Model = Callable[[Tensor], Tensor]
Norm = Literal["linf", "l2", "l1"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each image: logits [B, K], labels [B] or probabilities [B, K] -> [B]."""
    return F.cross_entropy(logits, y, reduction="none")


def uniform_in_ball(x: Tensor, eps: float | Tensor, norm: Norm = "linf") -> Tensor:
    """Offsets drawn uniformly from the ball of radius eps, one for each image of x [B, ...]."""
    # Not uniform_ or randn_like: torch.compile (2.13, aot_eager) takes two such draws for the same value.
    if norm == "linf":
        return (2 * torch.rand_like(x) - 1) * eps
    # The sums of a large image are infinite in fp16, and its offsets would be 0.
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm == "l2":
        # A Gaussian direction and the radius U^(1/d): the volume inside radius r grows as r^d.
        direction = torch.randn(x.shape, dtype=wide, device=x.device)
        length = summed(direction.square(), x).sqrt()
        return (direction / length * torch.rand_like(length) ** (1 / x[0].numel()) * eps).to(x.dtype)
    if norm == "l1":
        # d + 1 exponentials over their sum are uniform on a simplex; leaving one out fills it, signs fill the ball.
        exponential = -torch.log1p(-torch.rand_like(x, dtype=wide))
        total = summed(exponential, x)
        total = total - torch.log1p(-torch.rand_like(total))
        return (exponential / total * torch.sign(torch.rand_like(x) - 0.5) * eps).to(x.dtype)
    raise ValueError(f"norm is {norm!r}; it must be 'linf', 'l2' or 'l1'")


def summed(values: Tensor, x: Tensor) -> Tensor:
    return values.sum(tuple(range(1, x.dim())), keepdim=True)


def logits_with_ten_mantissa_bits(model: Model, points: Tensor) -> Tensor:
    """Logits in float32 (or float64); leaves a bf16 autocast for the forward.

    The error is a difference of nearly equal losses: bf16's 7 mantissa bits add a floor above the signal,
    while fp16 and TF32, with 10, do not.
    """
    device = points.device.type
    enabled = torch.is_autocast_enabled(device) and not in_bf16(points)
    with torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=enabled):
        logits = model(points)
        return logits if logits.dtype is torch.float64 else logits.float()


def in_bf16(points: Tensor) -> bool:
    """Whether autocast has networks compute in bf16 now, on the device of these points."""
    device = points.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
