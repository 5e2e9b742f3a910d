"""A small convolutional network for small images: minutes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three conv-BN-activation layers, the first two with stride 2, and two linear layers; images of any size."""

    def __init__(self, shape: tuple[int, int, int], classes: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        channels, height, width = shape
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(16),
            activation(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            activation(),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            activation(),
        )
        pixels = ((height + 3) // 4) * ((width + 3) // 4)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * pixels, 100), activation(), nn.Linear(100, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits
