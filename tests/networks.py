"""Tiny networks whose losses and gradients are known or quick to compute, shared by the tests."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Affine(nn.Module):
    """logits = W x + b: with `own_logit` as criterion, the loss is affine in x."""

    def __init__(self, inputs: int = 12, classes: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(classes, inputs, generator=generator))
        self.bias = nn.Parameter(torch.randn(classes, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.weight, self.bias)


class Quadratic(nn.Module):
    """The only logit is x^T A x + b^T x, so that with `own_logit` the loss is a known quadratic."""

    def __init__(self, inputs: int = 12, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(inputs, inputs, generator=generator))
        self.slope = nn.Parameter(torch.randn(inputs, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return ((x @ self.matrix) * x).sum(1, keepdim=True) + (x @ self.slope).unsqueeze(1)


def own_logit(logits: Tensor, y: Tensor) -> Tensor:
    """A criterion that is linear in the logits: the logit of the label itself."""
    return logits.gather(1, y.unsqueeze(1)).squeeze(1)


def smooth_net(inputs: int = 12, classes: int = 4, seed: int = 0) -> nn.Sequential:
    """A tanh network, smooth everywhere and without BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))


def conv_net(channels: int = 1, classes: int = 4) -> nn.Sequential:
    """A convolution with BatchNorm and a linear layer for images of 8 x 8, in train mode."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, classes),
    )


def any_size_net(num_classes: int = 4) -> nn.Sequential:
    """Convolutions with BatchNorm for colour images of any size; as `model=tests.networks:any_size_net`."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


class ConvBlock(nn.Module):
    """A convolution that halves the image, BatchNorm and ReLU: a block that `memory=low` can compute anew."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class InDouble(nn.Module):
    """A network that computes in float64: sums in another order then change no sign of a gradient."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.double())
        return logits


def double_conv_net(num_classes: int = 10) -> InDouble:
    """For grey images of 8 x 8, as `model=tests.networks:double_conv_net`."""
    return InDouble(nn.Sequential(ConvBlock(1), nn.Flatten(), nn.Linear(8 * 4 * 4, num_classes)))


def double_any_size_net(num_classes: int = 4) -> InDouble:
    """For colour images of any size, as `model=tests.networks:double_any_size_net`."""
    return InDouble(any_size_net(num_classes))


class BrokenOnSecondRank(nn.Module):
    """Its forward fails in training, on one rank alone."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and os.environ.get("RANK") == "1":
            raise RuntimeError("no such\nimage")
        return self.layer(x.flatten(1))


def broken_on_second_rank(num_classes: int = 10) -> BrokenOnSecondRank:
    """As `model=tests.networks:broken_on_second_rank`."""
    return BrokenOnSecondRank(num_classes)


class RoutedNet(nn.Module):
    """Bright images pass through a layer of their own, dark ones through another, and a third is for none.

    It remembers the mean of its last images in training, which it takes away afterwards.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.all, self.bright, self.dark, self.unused = (nn.Linear(64, num_classes) for _ in range(4))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        brightness = x.detach().mean(1)
        logits: Tensor = self.all(x)
        for chosen, layer in ((brightness > 0.345, self.bright), (brightness < 0.26, self.dark)):
            if chosen.any():
                logits = logits.index_add(0, chosen.nonzero()[:, 0], layer(x[chosen]))
        if self.training:
            self.mean.copy_(x.detach().mean(0))
            return logits
        return logits - self.all(self.mean)


def double_routed_net(num_classes: int = 10) -> InDouble:
    """For grey images of 8 x 8, as `model=tests.networks:double_routed_net`."""
    return InDouble(RoutedNet(num_classes))


def images(
    count: int = 32, shape: tuple[int, ...] = (1, 8, 8), classes: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern a class: x [count, *shape] in [0, 1], y [count]."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, *shape, generator=torch.Generator().manual_seed(99))
    y = torch.arange(count) % classes
    return (patterns[y] * 0.6 + torch.rand(count, *shape, generator=generator) * 0.4), y


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 40, lr: float = 0.1) -> nn.Module:
    """The model after some steps of plain training on all of x."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in l2: gradients of a small penalty are below assert_close's tolerances."""
    return float((found - expected).norm() / expected.norm())


def gradient(model: nn.Module) -> Tensor:
    """All parameters' gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@contextlib.contextmanager
def bfloat16_autocast() -> Iterator[None]:
    """bf16 on the CPU without oneDNN, whose AMX kernels crash on virtual machines that only claim to have AMX."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled
