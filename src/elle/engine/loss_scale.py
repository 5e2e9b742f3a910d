"""What a loss is multiplied by, so that half-precision gradients stay off zero; all on the device."""

from __future__ import annotations

import torch

# 1024 sufficed in every run measured.
_START = 1024.0


class LossScale:
    """One scale for all steps; a step whose gradients overflow is left out, and the scale halved."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _START, device=device)
        self.overflow = torch.zeros((), device=device)
        """1 where a gradient of this step is not finite, else 0."""
        self.one = torch.ones((), device=device)
        """Kept, so that no step has to write it."""

    def update(self) -> None:
        """Behind a step."""
        self.value.addcmul_(self.value, self.overflow, value=-0.5)
