"""BatchNorm with the statistics of all ranks' images: on any device, and differentiable twice.

torch.nn.SyncBatchNorm needs CUDA, and its backward cannot be differentiated, as GradAlign and others ask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase

from elle.engine.ranks import Ranks
from elle.errors import InputError
from elle.models.batch_norm import BatchNorm


class _Mean(Function):
    """The mean over the ranks. Each rank differentiates the sum of all ranks' losses, so it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.mean(value)

    @staticmethod
    def backward(ctx: Any, outgoing: Tensor) -> tuple[Tensor, None]:
        mean: Tensor = _Mean.apply(outgoing, ctx.ranks)  # type: ignore[no-untyped-call]
        return mean, None


class RanksBatchNorm(_BatchNorm):
    """Takes the place of a BatchNorm layer, with its parameters and buffers; in eval mode it computes the same."""

    def __init__(self, layer: _BatchNorm, ranks: Ranks) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.ranks = ranks
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.training = layer.training

    def _check_input_dim(self, x: Tensor) -> None:
        """Any number of dimensions: the layer's own check has passed before."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        axes = [0, *range(2, x.dim())]
        wide = x if x.dtype is torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, axes, correction=0)
        # In double, so that the difference of squares below loses nothing.
        mean, variance = mean.double(), variance.double()
        own = torch.stack([mean, variance + mean.square()])
        mean, square = _Mean.apply(own, self.ranks)  # type: ignore[no-untyped-call]
        variance = square - mean.square()
        self._remember(mean.detach(), variance.detach(), self.ranks.count * x.numel() // x.shape[1])
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        shift = -mean * scale if not self.affine else self.bias - mean * scale
        form = [1, -1] + [1] * (x.dim() - 2)
        y = torch.addcmul(shift.to(wide.dtype).view(form), wide, scale.to(wide.dtype).view(form))
        return y.to(x.dtype)

    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            self.running_mean.add_(share * (mean.to(self.running_mean.dtype) - self.running_mean))
            unbiased = (variance * count / (count - 1)).to(self.running_var.dtype)
            self.running_var.add_(share * (unbiased - self.running_var))


def synchronise(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Put a RanksBatchNorm in the place of every BatchNorm layer."""
    if isinstance(model, _BatchNorm):
        return RanksBatchNorm(_only_normalising(model), ranks)
    for name, child in list(model._modules.items()):  # not named_children, which leaves out a layer's second name
        if child is not None:
            setattr(model, name, synchronise(child, ranks))
    return model


def _only_normalising(layer: _BatchNorm) -> _BatchNorm:
    """The layer; InputError where it does more, as timm's BatchNorm with an activation inside: that would be lost."""
    kind = type(layer)
    if kind.forward not in (_BatchNorm.forward, SyncBatchNorm.forward, BatchNorm.forward) or "forward" in vars(layer):
        raise InputError(
            f"sync_bn=true: the network's {kind.__module__}.{kind.__qualname__} is a BatchNorm with a forward of its "
            f"own, which cannot be synchronised; leave sync_bn out"
        )
    return layer


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of layers that each rank normalises by itself; InstanceNorm may keep them too."""
    layers = [part for part in model.modules() if isinstance(part, _NormBase) and not isinstance(part, RanksBatchNorm)]
    found = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    return [buffer for buffer in found if buffer is not None]
