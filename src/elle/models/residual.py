"""Residual networks: ResNet, PreActResNet and WideResNet differ in their block, their widths and their stem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from elle.models.batch_norm import BatchNorm, called_plainly, forked_norm_act, norm_act, sum_norm_act
from elle.models.head import of_mean

Activation = Callable[[], nn.Module]
SMALL = 64
"""Images up to this many pixels a side keep their resolution in the stem; larger ones get ImageNet's stem."""


def _stem(shape: tuple[int, int, int], width: int) -> tuple[nn.Conv2d, nn.Module]:
    """The first convolution and a pooling: 3 x 3 and none for small images, 7 x 7 and 3 x 3 in strides of 2 else."""
    channels, height, image_width = shape
    if min(height, image_width) <= SMALL:
        return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
    return nn.Conv2d(channels, width, 7, 2, padding=3, bias=False), nn.MaxPool2d(3, 2, padding=1)


def _plan(width: int, stride: int, bottleneck: bool) -> list[tuple[int, int, int]]:
    """The convolutions of a block as (kernel, channels, stride)."""
    if bottleneck:
        return [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
    return [(3, width, stride), (3, width, 1)]


class PostActBlock(nn.Module):
    """Conv-BN twice or three times with activations between and after the sum; torchvision's names."""

    def __init__(self, width_in: int, width: int, stride: int, bottleneck: bool, activation: Activation) -> None:
        super().__init__()
        plan = _plan(width, stride, bottleneck)
        self.depth, channels = len(plan), width_in
        for k, (kernel, width_out, step) in enumerate(plan, 1):
            self.add_module(f"conv{k}", nn.Conv2d(channels, width_out, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{k}", BatchNorm(width_out))
            channels = width_out
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != channels:
            shortcut = nn.Conv2d(width_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, BatchNorm(channels))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return norm_act(*self._last_layer(x, x))

    def forked(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output twice, for its input given twice: once for its layers, once for what goes past them."""
        return forked_norm_act(*self._last_layer(x, skip))

    def _last_layer(self, x: Tensor, skip: Tensor) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
        """The last BatchNorm, the activation, and what they are applied to: `norm_act` makes the output of it."""
        skip = skip if self.downsample is None else self.downsample(skip)
        x = self.get_submodule("conv1")(x)
        for k in range(1, self.depth):
            x = self.layer(k, x)
        return getattr(self, f"bn{self.depth}"), self.activation, x, skip

    def layer(self, k: int, x: Tensor) -> Tensor:
        """The output of the convolution behind the k-th, for that of the k-th."""
        out: Tensor = getattr(self, f"conv{k + 1}")(norm_act(getattr(self, f"bn{k}"), self.activation, x))
        return out


class PreActBlock(nn.Module):
    """BN-activation-conv twice or three times; the shortcut starts after the first activation, as usual on CIFAR."""

    def __init__(self, width_in: int, width: int, stride: int, bottleneck: bool, activation: Activation) -> None:
        super().__init__()
        plan = _plan(width, stride, bottleneck)
        self.depth, channels = len(plan), width_in
        for k, (kernel, width_out, step) in enumerate(plan, 1):
            self.add_module(f"bn{k}", BatchNorm(channels))
            self.add_module(f"conv{k}", nn.Conv2d(channels, width_out, kernel, step, kernel // 2, bias=False))
            channels = width_out
        self.shortcut: nn.Module | None = None
        if stride != 1 or width_in != channels:
            self.shortcut = nn.Conv2d(width_in, channels, 1, stride, bias=False)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        out, skip = self.summands(x)
        return out + skip

    def summands(self, x: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The two whose sum is the block's output for x + addend."""
        out, skip = self.layer(1, x, addend)
        for k in range(2, self.depth + 1):
            out, _ = self.layer(k, out)
        return out, skip

    def layer(self, k: int, x: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k-th layer's output for x + addend, and what goes past the block if k is 1."""
        norm, conv = getattr(self, f"bn{k}"), getattr(self, f"conv{k}")
        if k == 1 and self.shortcut is not None:
            out, again = forked_norm_act(norm, self.activation, x, before=addend)
            return conv(out), self.shortcut(again)
        out, x = sum_norm_act(norm, self.activation, x, addend)
        return conv(out), x


def _stages(
    block: type[PreActBlock | PostActBlock],
    width_in: int,
    widths: Sequence[int],
    blocks: Sequence[int],
    bottleneck: bool,
    activation: Activation,
) -> list[nn.Sequential]:
    """Stages of `blocks` blocks each; every stage but the first halves the resolution."""
    stages = []
    for number, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        stage = nn.Sequential()
        for k in range(count):
            stage.append(block(width_in, width, 2 if number > 0 and k == 0 else 1, bottleneck, activation))
            width_in = 4 * width if bottleneck else width
        stages.append(stage)
    return stages


def _unseen(norm: nn.Module, *modules: nn.Module) -> bool:
    """Whether these may hand on something else than they return: a BatchNorm may fuse it, and nobody looks on."""
    return isinstance(norm, BatchNorm) and norm.arrivals is not None and all(map(called_plainly, modules))


def _he_initialise(model: nn.Module) -> None:
    """Convolutions as He et al. (arXiv 1502.01852) draw them, by the number of outputs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet(nn.Module):
    """He et al., arXiv 1512.03385, with the names of torchvision's networks, whose weights it loads."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        activation: Activation,
        *,
        blocks: Sequence[int],
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        self.conv1, self.maxpool = _stem(shape, 64)
        self.bn1 = BatchNorm(64)
        stages = _stages(PostActBlock, 64, (64, 128, 256, 512), blocks, bottleneck, activation)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(2048 if bottleneck else 512, classes)
        self.activation = activation()
        _he_initialise(self)

    @property
    def stages(self) -> list[nn.Module]:
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stages, in their order."""
        return [block for stage in self.stages for block in stage.children()]

    def forward(self, x: Tensor) -> Tensor:
        if self._hands_on():
            out = self._handed_on(self.conv1(x))
        else:
            out = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        logits = of_mean(self.fc, out)
        return self.fc(F.adaptive_avg_pool2d(out, 1).flatten(1)) if logits is None else logits

    def stem(self, x: Tensor) -> Tensor:
        """The input of the first block."""
        out: Tensor = self.maxpool(norm_act(self.bn1, self.activation, self.conv1(x)))
        return out

    def _hands_on(self) -> bool:
        """Whether blocks may give their output to the next one twice: those that were built here, one after another."""
        stages, blocks = self.stages, self.blocks
        built = all(type(one) is nn.Sequential for one in stages) and all(type(one) is PostActBlock for one in blocks)
        return built and _unseen(self.bn1, self.maxpool, *stages, *blocks)

    def _handed_on(self, x: Tensor) -> Tensor:
        """The last block's output; the BatchNorm before a fork gets the gradients of both ways, and adds them up."""
        x, skip = forked_norm_act(self.bn1, self.activation, x)
        if not isinstance(self.maxpool, nn.Identity):
            x = skip = self.maxpool(x)
        for block in self.blocks:
            assert isinstance(block, PostActBlock)
            x, skip = block.forked(x, skip)
        return x


class PreActResNet(nn.Module):
    """He et al., arXiv 1603.05027: stages of PreActBlocks, a final BatchNorm, average pooling, one linear layer."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        activation: Activation,
        *,
        blocks: Sequence[int],
        bottleneck: bool = False,
        stem_width: int = 64,
        widths: Sequence[int] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        self.conv, self.pool = _stem(shape, stem_width)
        stages = _stages(PreActBlock, stem_width, widths, blocks, bottleneck, activation)
        self.blocks = nn.Sequential(*(block for stage in stages for block in stage))
        features = widths[-1] * (4 if bottleneck else 1)
        self.bn = BatchNorm(features)
        self.linear = nn.Linear(features, classes)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        out, skip = self._summands(self.stem(x))
        out = norm_act(self.bn, self.activation, out, before=skip)
        logits = of_mean(self.linear, out)
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1)) if logits is None else logits

    def stem(self, x: Tensor) -> Tensor:
        """The input of the first block."""
        out: Tensor = self.pool(self.conv(x))
        return out

    def _summands(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The two whose sum is the last block's output: each block leaves its sum to the BatchNorm that reads it.

        Only where that BatchNorm may fuse the two, and nobody wants to see or to replace what a block computes.
        """
        if not _unseen(self.bn, self.blocks, *self.blocks):
            return self.blocks(x), None
        skip: Tensor | None = None
        for block in self.blocks:
            assert isinstance(block, PreActBlock)
            x, skip = block.summands(x, skip)
        return x, skip


class WideResNet(PreActResNet):
    """WRN-`depth`-`factor` (Zagoruyko and Komodakis, arXiv 1605.07146): three wide stages of PreActBlocks."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, activation: Activation, *, depth: int, factor: int
    ) -> None:
        widths = (16 * factor, 32 * factor, 64 * factor)
        super().__init__(shape, classes, activation, blocks=[(depth - 4) // 6] * 3, stem_width=16, widths=widths)
        _he_initialise(self)
