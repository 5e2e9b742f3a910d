"""A network's first convolution by kernels of our own: cuDNN pads an image's few channels and copies it to do so."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elle.models.batch_norm import launchable
from elle.models.tiles import padded

AT_MOST = 4
"""Channels of an image."""


@dataclass(frozen=True)
class Tiles:
    """How a kernel deals out its work: so many pixels a program."""

    pixels: int
    warps: int


FORWARD = Tiles(128, 4)
BACKWARD = Tiles(128, 4)
WEIGHTS = Tiles(128, 4)
"""benchmarks/first_convolution.py compares them with others."""
PARTS = 256
"""Programs of the weights' gradient, a power of 2: twice as many as a large GPU runs, so that loads wait for no one."""
PRODUCT = 16
"""Rows and columns that a product of matrices has at least."""
WIDEST = 128
"""Images: a program of the input gradient has whole rows."""


def suits(layer: nn.Conv2d) -> bool:
    """Whether the kernels are for such a layer, of those without a bias."""
    return (
        layer.in_channels <= AT_MOST
        and layer.out_channels % 16 == 0
        and layer.out_channels <= 128
        and (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))
        and (layer.dilation, layer.groups) == ((1, 1), 1)
    )


def takes(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute this convolution, here and now."""
    return (
        suits(layer)
        and _on_gpu(x)
        and x.dim() == 4
        and x.shape[1] == layer.in_channels
        and x.dtype in (torch.float16, torch.float32)
        and weight.dtype is torch.float16
        and x.shape[3] <= WIDEST
        and x.numel() > 0
        and x.numel() // x.shape[1] * layer.out_channels < 2**31
        and sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) < 2**31
        and _multiplies(x.device)
        and launchable(x.device)
    )


def convolved(x: Tensor, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """The convolution of x, rounded to float16, by weight; the channels last."""
    tiles = tiles or FORWARD
    (n, channels, height, width), outputs = x.shape, weight.shape[0]
    y = torch.empty(n, outputs, height, width, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = n * height * width
    kernels: Any = _kernels()
    # Triton launches where the host is, not where its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.write_convolved[(-(-pixels // tiles.pixels),)](
            x, weight, y, pixels, x.stride(), weight.stride(), channels, outputs, height, width, block=tiles.pixels,
            columns=padded(outputs, PRODUCT), depth=padded(9 * channels, PRODUCT), num_warps=tiles.warps,
        )  # fmt: skip
    return y


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """The gradient of x, in its own type, by that of the convolution's result."""
    tiles = tiles or BACKWARD
    (n, channels, height, width), outputs = x.shape, weight.shape[0]
    g, for_x = g.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
    block = max(tiles.pixels, padded(width, PRODUCT))
    kernels: Any = _kernels()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.write_input_gradient[(-(-n * height // (block // width)),)](
            g, weight, for_x, n * height * width, for_x.stride(), weight.stride(), channels, outputs, height, width,
            block=block, columns=padded(outputs, PRODUCT), at_most=AT_MOST, num_warps=tiles.warps,
        )  # fmt: skip
    return for_x


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """The gradient of the weights, in their type, by that of the convolution's result."""
    tiles = tiles or WEIGHTS
    (n, channels, height, width), outputs = x.shape, weight.shape[0]
    g, for_weight = g.contiguous(memory_format=torch.channels_last), torch.empty_like(weight)
    pixels, columns, depth = n * height * width, padded(outputs, PRODUCT), padded(9 * channels, PRODUCT)
    parts = min(PARTS, -(-pixels // tiles.pixels))
    partial = torch.empty(parts, depth, columns, dtype=torch.float32, device=x.device)
    kernels: Any = _kernels()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.add_weight_gradient[(parts,)](
            g, x, partial, pixels, x.stride(), channels, outputs, height, width,
            block=tiles.pixels, columns=columns, depth=depth, num_warps=tiles.warps,
        )  # fmt: skip
        kernels.write_weight_gradient[(9 * channels,)](
            partial, for_weight, parts, for_weight.stride(), channels, outputs,
            most=PARTS, columns=columns, depth=depth, num_warps=8,
        )  # fmt: skip
    return for_weight


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@functools.cache
def _kernels() -> ModuleType:
    from elle.models import first_convolution_kernels

    return first_convolution_kernels


@functools.cache
def _multiplies(device: torch.device) -> bool:
    """Whether Triton has matrix products of float16 for it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
