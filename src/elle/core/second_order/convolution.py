"""Convolutions whose gradient is cheap to differentiate once more.

torch differentiates a convolution's input gradient with respect to the weight by a convolution whose kernel is a whole
image, which no library has a fast kernel for. It is an ordinary weight gradient, with the incoming direction in
place of the input; written so, double backpropagation through a network costs a fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Settings = tuple[list[int], list[int], list[int], int]
"""stride, padding, dilation, groups"""


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        y: Tensor = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
        return y

    @staticmethod
    def backward(ctx: Any, outgoing: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        for_x = _input_gradient(outgoing, weight, x, ctx.settings) if asked_for(ctx, 0) else None
        for_weight = _weight_gradient(outgoing, x, weight, ctx.settings) if asked_for(ctx, 1) else None
        return for_x, for_weight, None


class _InputGradient(Function):
    """(gradient of the output, weight) -> gradient of x, linear in each; x gives its shape only."""

    @staticmethod
    def forward(ctx: Any, outgoing: Tensor, weight: Tensor, x: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(outgoing, weight)
        ctx.settings = settings
        return _backward(outgoing, x, weight, settings, 0)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        outgoing, weight = ctx.saved_tensors
        for_outgoing = _convolve(direction, weight, ctx.settings) if asked_for(ctx, 0) else None
        for_weight = _weight_gradient(outgoing, direction, weight, ctx.settings) if asked_for(ctx, 1) else None
        return for_outgoing, for_weight, None, None


class _WeightGradient(Function):
    """(gradient of the output, x) -> gradient of the weight, linear in each; the weight gives its shape only."""

    @staticmethod
    def forward(ctx: Any, outgoing: Tensor, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(outgoing, x)
        ctx.settings = settings
        return _backward(outgoing, x, weight, settings, 1)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        outgoing, x = ctx.saved_tensors
        for_outgoing = _convolve(x, direction, ctx.settings) if asked_for(ctx, 0) else None
        for_x = _input_gradient(outgoing, direction, x, ctx.settings) if asked_for(ctx, 1) else None
        return for_outgoing, for_x, None, None


_convolve: Callable[..., Tensor] = _Convolution.apply
_input_gradient: Callable[..., Tensor] = _InputGradient.apply
_weight_gradient: Callable[..., Tensor] = _WeightGradient.apply


def asked_for(ctx: Any, position: int) -> bool:
    """Whether this very backward has a use for the gradient of a tensor: an attack asks for those of the images alone.

    `needs_input_grad` only tells what could be asked for, so that every attack would compute all weight gradients too.
    All arguments up to `position` must be tensors: torch keeps no place for others.
    """
    if not ctx.needs_input_grad[position]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[position][0]))
    except RuntimeError:  # what torch answers for a leaf that `torch.autograd.grad` was asked for
        return True


def _backward(outgoing: Tensor, x: Tensor, weight: Tensor, settings: Settings, which: int) -> Tensor:
    stride, padding, dilation, groups = settings
    wanted = [which == 0, which == 1, False]
    gradients = torch.ops.aten.convolution_backward(
        outgoing, x, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )
    gradient: Tensor = gradients[which]
    return gradient


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or x.dim() != 4:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = x.to(torch.get_autocast_dtype(device)), weight.to(torch.get_autocast_dtype(device))
    settings = (_pair(stride), _pair(padding), _pair(dilation), groups)
    with torch.autocast(device, enabled=False):
        y = _convolve(x, weight, settings)
    return y if bias is None else y + bias.to(y.dtype).view(1, -1, 1, 1)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))
