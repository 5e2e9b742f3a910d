"""What the attacks maximise, beside the cross-entropy: functions of logits [B, K] with one value an image."""

from __future__ import annotations

import torch
from torch import Tensor

DLR_CLASSES = 4
"""The targeted DLR loss reads so many logits."""


def violation(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k != y} z_k - z_y: above 0 once the image is misclassified."""
    own = logits.gather(1, y.unsqueeze(1))
    others = logits.scatter(1, y.unsqueeze(1), float("-inf"))
    return others.amax(1) - own.squeeze(1)


def difference(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """z_t - z_y."""
    return (logits.gather(1, target.unsqueeze(1)) - logits.gather(1, y.unsqueeze(1))).squeeze(1)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2), z_(i) the i-th largest logit (arXiv 2003.01690, eq. 7).

    With fewer than four classes it is the margin z_t - z_y alone: divided by z_(1) - z_(3), a third-placed target
    would have the value -1 wherever it is third, and no gradient to climb.
    """
    if logits.shape[1] < DLR_CLASSES:
        return difference(logits, y, target)
    top = logits.topk(DLR_CLASSES, dim=1).values
    return difference(logits, y, target) / (top[:, 0] - top[:, 2:].mean(1) + 1e-12)


def runners_up(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The `count` likeliest classes other than y, likeliest first [B, count]."""
    others = logits.scatter(1, y.unsqueeze(1), float("-inf"))
    return torch.sort(others, dim=1, descending=True, stable=True).indices[:, :count]
