"""The running mean of a network's weights, found more robust than the last of them (Gowal et al., arXiv 2010.03593)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Average:
    """A running mean of all tensors of a network's state: mean <- decay mean + (1 - decay) value after every step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, before: Tensor) -> None:
        """Add the network of now to the mean; `before`, the number of earlier steps, lowers the decay at the start."""
        # 9 / (10 + before) is 1 - (1 + before) / (10 + before): the beginning, far from the end, is forgotten soon.
        share = (9 / (10 + before)).clamp(min=1 - self.decay).float()
        values = self.model.state_dict()
        floats = [name for name, mean in self.tensors.items() if mean.is_floating_point()]
        means = [self.tensors[name] for name in floats]
        steps = torch._foreach_sub([values[name] for name in floats], means)
        torch._foreach_mul_(steps, share)
        torch._foreach_add_(means, steps)
        if counts := list(self.tensors.keys() - floats):  # BatchNorm's, of batches
            torch._foreach_copy_([self.tensors[name] for name in counts], [values[name] for name in counts])

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the network holds the mean weights, copied into its own memory; afterwards its own again."""
        values = self.model.state_dict()
        own = {name: value.detach().clone() for name, value in values.items()}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.model.state_dict().items():
            value.copy_(tensors[name])
