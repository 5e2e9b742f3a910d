"""Training losses: (model, x, y, x_adv) -> loss, logits."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def adversarial_cross_entropy(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, x_adv: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy at the adversarial points, averaged over the batch (Madry et al., arXiv 1706.06083)."""
    logits = model(x_adv).float()
    return F.cross_entropy(logits, y), logits
