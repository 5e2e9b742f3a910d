"""Pre-activation residual networks for small images (He et al., arXiv 1603.05027)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PreActBlock(nn.Module):
    """BN-ReLU-conv twice; the shortcut starts after the first activation, as in the usual CIFAR networks."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        return out + skip  # type: ignore[no-any-return]


class PreActResNet(nn.Module):
    """Four stages of PreActBlocks of width 64, 128, 256, 512, a final BatchNorm, average pooling, one linear layer."""

    def __init__(self, blocks: tuple[int, int, int, int], channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, 1, padding=1, bias=False)
        stages: list[nn.Module] = []
        width_in = 64
        for width, count, stride in zip((64, 128, 256, 512), blocks, (1, 2, 2, 2), strict=True):
            for k in range(count):
                stages.append(PreActBlock(width_in, width, stride if k == 0 else 1))
                width_in = width
        self.blocks = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.blocks(self.conv(x))))
        out = F.adaptive_avg_pool2d(out, 1).flatten(1)
        logits: Tensor = self.linear(out)
        return logits
