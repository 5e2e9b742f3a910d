"""Convolutions whose weight gradients are computed on a stream of their own.

A backward pass goes from layer to layer, and each waits for the one before. What nothing waits for until the update are
the weights' gradients: beside that chain, they fill a GPU that its small kernels leave half idle.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from elle.core.second_order.convolution import asked_for
from elle.models import first_convolution, head

BEHIND = 3
"""So many weight gradients may be under way; the images and gradients that they read are kept as long."""

Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Of a convolution: stride, padding, dilation and groups."""


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all work that is done beside a device's current stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Beside:
    """Work beside a device's current stream, within one step; on a CPU, or unless wanted, it is simply done."""

    def __init__(self, device: torch.device, wanted: bool = True, kernels: bool = True) -> None:
        self.side = side_stream(device) if wanted and device.type == "cuda" else None
        self.kernels = kernels
        """Whether kernels of our own may compute a network's first convolution."""
        self.under_way: deque[tuple[Any, tuple[Tensor, ...]]] = deque()
        self.found: dict[int, Tensor] = {}
        """The gradient of each weight that has one, by its place in memory."""

    def start(self, weight: Tensor, work: Callable[[], Tensor], *read: Tensor) -> Tensor | None:
        """Have `work` compute a gradient of `weight`: returned where it is simply done, else left to `finish`.

        Autograd is not given what is unfinished: it would add to it what the weight has from elsewhere.
        """
        if self.side is None:
            return work()
        current = torch.cuda.current_stream()
        while len(self.under_way) >= BEHIND:
            current.wait_event(self.under_way.popleft()[0])
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            gradient = work()
            first = self.found.setdefault(weight.data_ptr(), gradient)
            if first is not gradient:
                first += gradient
            done = self.side.record_event()
        # What is read would be given away once the current stream has no use for it.
        self.under_way.append((done, (*read, gradient)))
        return None

    def finish(self) -> dict[int, Tensor]:
        """Have the current stream wait for all that is under way; `found`, which begins anew."""
        while self.under_way:
            torch.cuda.current_stream().wait_event(self.under_way.popleft()[0])
        found, self.found = self.found, {}
        return found

    def convolution(self, layer: nn.Conv2d) -> Callable[[Tensor, Tensor, None], Tensor]:
        """A replacement for the `_conv_forward` of a layer that `suits`."""
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)

        def forward(x: Tensor, weight: Tensor, bias: None) -> Tensor:
            # Of another weight nobody would ask `finish` for the gradient; of one image, or within torch.func, it is
            # torch's alone to find.
            if weight is not layer.weight or x.dim() != 4 or torch._C._functorch.maybe_current_level() is not None:
                plain: Tensor = nn.Conv2d._conv_forward(layer, x, weight, bias)
                return plain
            first = self.kernels and first_convolution.takes(layer, x, weight)  # which reads x in any type
            x = x if first else x.to(weight.dtype)
            y: Tensor = _Convolution.apply(x, weight, settings, self, first)  # type: ignore[no-untyped-call]
            return y

        return forward

    def of_mean(self, layer: nn.Linear) -> Callable[[Tensor], Tensor | None]:
        """A function for the mean over pixels and the layer behind it at once; it returns None where no kernel does."""
        own = dict(layer._parameters)

        def forward(x: Tensor) -> Tensor | None:
            # Others are its parameters within `functional_call`.
            same = all(layer._parameters[name] is one for name, one in own.items())
            if not same or not head.takes(layer, x):
                return None
            logits: Tensor = _OfMean.apply(x, layer.weight, layer.bias, self)  # type: ignore[no-untyped-call]
            return logits

        return forward


def suits(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a layer's weight gradients may be computed beside: a plain convolution without a bias."""
    return (
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and all(isinstance(setting, tuple) for setting in (layer.stride, layer.padding, layer.dilation))
    )


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Settings, beside: Beside, first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.beside, ctx.first = settings, beside, first
        if first:
            return first_convolution.convolved(x, weight)
        stride, padding, dilation, groups = settings
        if weight.shape[2:] == (1, 1) and padding == (0, 0) and not torch.backends.cudnn.benchmark:
            # Not allowed to try its kernels, cuDNN takes one for strides that lays all of x out anew: 0.4 ms of the 3.3
            # that a forward of 1,024 images takes in PreActResNet18.
            x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
        return torch.conv2d(x, weight, None, stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        gradient = functools.partial(_gradient, g, x, weight, ctx.settings)
        by_kernel = functools.partial(first_convolution.weight_gradient, g, x, weight)
        for_weight = None
        if asked_for(ctx, 1):
            for_weight = ctx.beside.start(weight, by_kernel if ctx.first else functools.partial(gradient, 1), g, x)
        for_x = None
        if asked_for(ctx, 0):
            for_x = first_convolution.input_gradient(g, x, weight) if ctx.first else gradient(0)
        return for_x, for_weight, None, None, None


class _OfMean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, beside: Beside) -> Tensor:
        logits, mean = head.logits_and_mean(x, weight, bias)
        ctx.save_for_backward(mean, weight, bias)
        ctx.shape, ctx.beside = x.shape, beside
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        mean, weight, bias = ctx.saved_tensors
        for_weight = for_bias = None
        if asked_for(ctx, 1):
            for_weight = ctx.beside.start(weight, lambda: g.to(mean.dtype).mT @ mean, g, mean)
        if asked_for(ctx, 2):
            for_bias = ctx.beside.start(bias, lambda: g.sum(0, dtype=torch.float32).to(bias.dtype), g)
        for_x = head.input_gradient(g, weight, ctx.shape) if asked_for(ctx, 0) else None
        return for_x, for_weight, for_bias, None


def _gradient(g: Tensor, x: Tensor, weight: Tensor, settings: Settings, of: int) -> Tensor:
    """The gradient of the convolution's images (`of` is 0) or weights (1)."""
    stride, padding, dilation, groups = settings
    asked = [of == 0, of == 1, False]
    found = torch.ops.aten.convolution_backward(
        g, x.to(g.dtype), weight, None, stride, padding, dilation, False, [0, 0], groups, asked
    )  # fmt: skip
    gradient: Tensor = found[of]
    return gradient
