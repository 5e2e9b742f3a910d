"""Random numbers that depend on (seed, stream, image) alone: not on batches, their order, or the device.

A counter-based generator (SplitMix64, Steele et al. 2014) in tensor operations; int64 arithmetic wraps around.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _mixed(z: Tensor) -> Tensor:
    z = z * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's own repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _stream_keys(seed: int, stream: int) -> tuple[int, int]:
    """Two plain numbers that tell the stream from others; to make a tensor of them later would break a CUDA graph."""
    first, second = _mixed(torch.tensor([seed % 2**62, stream]) + 1).tolist()
    return first, second


def keys(seed: int, stream: int, index: Tensor) -> Tensor:
    """One key for each index [B]; different streams of one seed are unrelated."""
    first, second = _stream_keys(seed, stream)
    return _mixed(_mixed(index + 1 + first) + second)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) of the given shape for each key: [B, *shape], float32."""
    counter = torch.arange(math.prod(shape), device=key.device)
    bits = _mixed(key.unsqueeze(1) + counter * 2 + 1)
    return (_shifted(bits, 40).to(torch.float32) / 2**24).view(len(key), *shape)


def signs(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fair -1 or 1."""
    return 1 - 2 * (uniform(key, shape) < 0.5).to(torch.float32)


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers (Box and Muller)."""
    pair = uniform(key, (2, *shape))
    radius = (-2 * (1 - pair[:, 0]).log()).sqrt()
    return radius * (2 * math.pi * pair[:, 1]).cos()
