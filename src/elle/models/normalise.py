"""The dataset's mean and standard deviation as a network's first layer, so that images in [0, 1] go in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of pixels in [0, 1]."""
NAMES = ("normalise.mean", "normalise.std")
"""Of the statistics among the weights of a `normalised` network."""
PREFIX = "network."
"""Before the names of all its other weights."""


class Normalise(nn.Module):
    """(x - mean) / std by channel; the two are buffers, so saved weights carry them."""

    mean: Tensor
    std: Tensor

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        for name, values in zip(("mean", "std"), statistics, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def normalised(network: nn.Module, statistics: Statistics) -> nn.Module:
    """The network behind a normalising first layer; its own names get the prefix."""
    return nn.Sequential(OrderedDict(normalise=Normalise(statistics), network=network))
