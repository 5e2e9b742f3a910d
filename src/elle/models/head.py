"""The head of a network, a linear layer behind the mean over an image's pixels: torch's operations, or two kernels."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elle.models.batch_norm import launchable, watched
from elle.models.tiles import padded

MOST_OUTPUTS = 128
"""Of more, torch's product of matrices takes less time."""
TILE = 8192
"""Values that a program has at once, of the images and of the weights."""


def of_mean(layer: nn.Module, x: Tensor) -> Tensor | None:
    """The layer's answer to the mean of x over its pixels, where a step has put there what computes both at once.

    Whoever asks calls the layer itself where this is None, and not another function for it: a compiler would compile
    that one anew in every step, as every step has another `forward` for the layer.
    """
    at_once: Any = None if torch.compiler.is_compiling() else getattr(layer, "of_mean", None)
    answer: Tensor | None = None if at_once is None else at_once(x)
    return answer


def takes(layer: nn.Linear, x: Tensor) -> bool:
    """Whether the kernels compute this, here and now."""
    return (
        _on_gpu(x)
        and x.dim() == 4
        and x.dtype is torch.float16
        and x.is_contiguous(memory_format=torch.channels_last)
        and 0 < x.numel() < 2**31
        and x.shape[1] == layer.in_features
        and layer.out_features <= MOST_OUTPUTS
        and all(one is not None and one.dtype is torch.float16 for one in (layer.weight, layer.bias))
        and layer.weight.is_contiguous()
        and not watched(layer)
        and torch._C._functorch.maybe_current_level() is None
        and launchable(x.device)
    )


def logits_and_mean(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, in float32, and the mean over the pixels."""
    (images, channels, height, width), outputs = x.shape, len(weight)
    logits = torch.empty(images, outputs, dtype=torch.float32, device=x.device)
    mean = torch.empty(images, channels, dtype=x.dtype, device=x.device)
    columns = padded(outputs)
    block = min(padded(channels), TILE // columns)
    kernels: Any = _kernels()
    # Triton launches where the host is, not where its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.write_logits[(images,)](
            x, weight, bias, logits, mean, height * width, channels, outputs,
            rows=min(padded(height * width), TILE // block), block=block, columns=columns, num_warps=8,
        )  # fmt: skip
    return logits, mean


def input_gradient(g: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of x, of this shape, by that of the logits."""
    (images, channels, height, width), outputs = shape, len(weight)
    g = g.contiguous()
    for_x = torch.empty(shape, dtype=weight.dtype, device=g.device, memory_format=torch.channels_last)
    columns = padded(outputs)
    block = min(padded(channels), 128)
    kernels: Any = _kernels()
    with torch.cuda.device_of(g):  # type: ignore[no-untyped-call]
        kernels.write_input_gradient[(images * -(-channels // block),)](
            g, weight, for_x, height * width, channels, outputs,
            rows=min(padded(height * width), 16), block=block, columns=columns, num_warps=4,
        )  # fmt: skip
    return for_x


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@functools.cache
def _kernels() -> ModuleType:
    from elle.models import head_kernels

    return head_kernels
