"""What a loss is multiplied by, so that half-precision gradients stay off zero; all on the device."""

from __future__ import annotations

import torch

# 1024 sufficed in every run measured.
_START = 1024.0


class LossScale:
    """A step whose gradients overflow is left out and the scale halved; every epoch doubles it again, up to its start.

    Without the way back, one bad stretch would cost the small gradients of all the steps behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _START, device=device)
        self.overflow = torch.zeros((), device=device)
        """1 where a gradient of this step is not finite, else 0."""
        self.one = torch.ones((), device=device)
        """A constant on the device, made once."""

    def update(self) -> None:
        """After a step: halve the scale where a gradient overflowed."""
        self.value.addcmul_(self.value, self.overflow, value=-0.5)

    def rise(self) -> float | None:
        """After an epoch: double the scale, up to its start; returns what it had fallen to, None where it had not."""
        lowered = float(self.value)
        self.value.mul_(2).clamp_(max=_START)
        return lowered if lowered < _START else None
