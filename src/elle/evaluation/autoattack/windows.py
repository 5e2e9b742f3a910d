"""Square's random windows: their sizes shrink by a schedule, their places are drawn once for all points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elle.evaluation.autoattack import noise
from elle.evaluation.autoattack.norms import Norm

_FIRST_SHARE = 0.8
_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries after which the share of the image that a window covers is halved."""


@dataclass(frozen=True)
class Windows:
    """Tensors [Q], or rows of them [S]: the window of each query, and for l2 and l1 a second one of the same size."""

    side: Tensor
    corner: Tensor
    """[Q, 4]: top and left of the window, top and left of the second."""
    sign: Tensor
    """[Q, C]."""
    turned: Tensor
    pattern: Tensor
    """Index into `patterns`."""
    patterns: Tensor
    """The bump of every size [P, s, s], padded with zeros; for linf empty."""

    def at(self, query: Tensor) -> Windows:
        fields = ("side", "corner", "sign", "turned", "pattern")
        return replace(self, **{name: getattr(self, name)[query] for name in fields})

    def offsets(self, like: Tensor, second: bool = False) -> tuple[Tensor, Tensor]:
        """Each pixel's row and column counted from the window's corner: [S, H, 1] and [S, 1, W]."""
        height, width = like.shape[-2:]
        top, left = self.corner[:, 2 * second], self.corner[:, 2 * second + 1]
        rows = torch.arange(height, device=like.device) - top.unsqueeze(1)
        columns = torch.arange(width, device=like.device) - left.unsqueeze(1)
        return rows.unsqueeze(2), columns.unsqueeze(1)

    def mask(self, like: Tensor, second: bool = False) -> Tensor:
        """1 inside the window, 0 outside [S, 1, H, W]."""
        rows, columns = self.offsets(like, second)
        side = self.side.view(-1, 1, 1)
        inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
        return inside.unsqueeze(1).to(like.dtype)


def window_plan(
    queries: int, channels: int, size: tuple[int, int], norm: Norm, seed: int, device: torch.device
) -> Windows:
    height, width = size
    sides = [_side(query, height, width, norm) for query in range(queries)]
    side = torch.tensor(sides, device=device)
    key = noise.keys(seed, 3, torch.arange(queries, device=device))
    drawn = noise.uniform(key, (5,))
    # As in the original, the last place is never drawn.
    places = torch.stack([height - side, width - side] * 2, dim=1).clamp(min=0)
    corner = (drawn[:, :4] * places).long()
    sizes = sorted(set(sides))
    pattern = torch.tensor([sizes.index(one) for one in sides], device=device)
    patterns = torch.zeros(0 if norm == "linf" else len(sizes), sizes[-1], sizes[-1], device=device)
    for index, one in enumerate(sizes if norm != "linf" else ()):
        patterns[index, :one, :one] = two_bumps(one, norm)
    sign = noise.signs(noise.keys(seed, 4, torch.arange(queries, device=device)), (channels,))
    return Windows(side, corner, sign, drawn[:, 4] < 0.5, pattern, patterns)


def _side(query: int, height: int, width: int, norm: Norm) -> int:
    share = _FIRST_SHARE / 2 ** sum(query > bound for bound in _HALVED_AFTER)
    side = max(round(math.sqrt(share * height * width)), 1 if norm == "linf" else 3)
    if norm != "linf" and side % 2 == 0:
        side += 1
    return min(side, height, width)


def bump(row: Windows, like: Tensor) -> Tensor:
    """Each slot's bump in its place on an empty image [S, 1, H, W]."""
    rows, columns = row.offsets(like)
    last = row.patterns.shape[1] - 1
    turned = row.turned.view(-1, 1, 1)
    first = torch.where(turned, columns, rows).clamp(0, last)
    second = torch.where(turned, rows, columns).clamp(0, last)
    return row.patterns[row.pattern.view(-1, 1, 1), first, second].unsqueeze(1) * row.mask(like)


def two_bumps(side: int, norm: Norm) -> Tensor:
    """A positive bump above a negative one, of norm 1 [side, side] (the paper's eta)."""
    half = side // 2
    pattern = torch.cat((_one_bump(half, side, norm), -_one_bump(side - half, side, norm)))
    return pattern / (pattern.square().sum().sqrt() if norm == "l2" else pattern.abs().sum())


def _one_bump(height: int, width: int, norm: Norm) -> Tensor:
    """Rectangles around the middle, each one pixel larger on every side and weighted by its size^-2 (l1: size^-4)."""
    pattern = torch.zeros(height, width)
    middle_row, middle_column = height // 2, width // 2
    for ring in range(max(middle_row, middle_column) + 1):
        rows = slice(max(middle_row - ring, 0), middle_row + ring + 1)
        columns = slice(max(middle_column - ring, 0), middle_column + ring + 1)
        pattern[rows, columns] += 1 / (ring + 1) ** (2 if norm == "l2" else 4)
    if height:
        pattern /= pattern.square().sum().sqrt() if norm == "l2" else pattern.abs().sum()
    return pattern


def tiling(height: int, width: int, norm: Norm, seed: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """About five by five tiles: each pixel's tile [H, W], the tiles' bumps [H, W], 0 in the margin, and their count."""
    side = max(height // 5, 1)
    first = (height - side * 5) // 2 if height >= 5 else 0
    tile = torch.zeros(height, width, dtype=torch.int64)
    pattern = torch.zeros(height, width)
    bumps = two_bumps(side, norm)
    across = max(width // side, 1)
    count = height // side * across
    turned = noise.uniform(noise.keys(seed, 5, torch.zeros(1, dtype=torch.int64)), (count,))[0] < 0.5
    for row in range(height // side):
        for column in range(across):
            top, left = first + row * side, first + column * side
            # Where the original would step over the edge, the tile is cut off there.
            space = pattern[top : top + side, left : left + side]
            number = row * across + column
            space.copy_((bumps.T if turned[number] else bumps)[: space.shape[0], : space.shape[1]])
            tile[top : top + side, left : left + side] = number
    return tile.to(device), pattern.to(device), count
