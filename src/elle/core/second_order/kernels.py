"""The second derivative of BatchNorm in three GPU kernels: five sums, coefficients of a channel, one combination.

They read float16, bfloat16 or float32 with the channels last, and add up in float32. See `batch_norm` for the formula.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 32
"""A tile: values of a channel, and channels."""
MOST_PARTS = 256
"""Into so many parts at most the values of a channel are split: a few programs for each multiprocessor."""


@triton.jit
def _sums(v, g, x, mean, rstd, partial, count, channels, rows_a_part, rows: tl.constexpr, columns: tl.constexpr):
    """partial[5, parts, channels]: sums of v, g, v xhat, g xhat and v g over a part of the values of a channel."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = column < channels
    centre = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(rstd + column, mask=inside, other=0.0)[None, :]
    sum_v = tl.zeros([columns], tl.float32)
    sum_g = tl.zeros([columns], tl.float32)
    v_xhat = tl.zeros([columns], tl.float32)
    g_xhat = tl.zeros([columns], tl.float32)
    v_g = tl.zeros([columns], tl.float32)
    for start in range(0, rows_a_part, rows):
        row = part * rows_a_part + start + tl.arange(0, rows)
        place = row[:, None].to(tl.int64) * channels + column[None, :]
        known = (row[:, None] < count) & inside[None, :]
        v_here = tl.load(v + place, mask=known, other=0.0).to(tl.float32)
        g_here = tl.load(g + place, mask=known, other=0.0).to(tl.float32)
        # Outside of the array v and g are 0, so xhat does not matter there.
        xhat = (tl.load(x + place, mask=known, other=0.0).to(tl.float32) - centre) * scale
        sum_v += tl.sum(v_here, 0)
        sum_g += tl.sum(g_here, 0)
        v_xhat += tl.sum(v_here * xhat, 0)
        g_xhat += tl.sum(g_here * xhat, 0)
        v_g += tl.sum(v_here * g_here, 0)
    target = partial + part * channels + column
    step = parts * channels
    tl.store(target, sum_v, mask=inside)
    tl.store(target + step, sum_g, mask=inside)
    tl.store(target + 2 * step, v_xhat, mask=inside)
    tl.store(target + 3 * step, g_xhat, mask=inside)
    tl.store(target + 4 * step, v_g, mask=inside)


@triton.jit
def _total(partial, kind, parts, channels, column, inside, columns: tl.constexpr, most: tl.constexpr):
    part = tl.arange(0, most)
    place = (kind * parts + part[:, None]) * channels + column[None, :]
    return tl.sum(tl.load(partial + place, mask=(part[:, None] < parts) & inside[None, :], other=0.0), 0)


@triton.jit
def _coefficients(
    partial, weight, rstd, v_weight, v_bias, factors, for_weight, count, parts, channels,
    columns: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """factors[7, channels]: of v, g, xhat and 1 in the derivative by x, and of v, xhat and 1 in the one by g."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = column < channels
    sum_v = _total(partial, 0, parts, channels, column, inside, columns, most)
    sum_g = _total(partial, 1, parts, channels, column, inside, columns, most)
    v_xhat = _total(partial, 2, parts, channels, column, inside, columns, most)
    g_xhat = _total(partial, 3, parts, channels, column, inside, columns, most)
    v_g = _total(partial, 4, parts, channels, column, inside, columns, most)
    over = 1.0 / count
    r = tl.load(rstd + column, mask=inside, other=0.0)
    toward_weight = tl.load(v_weight + column, mask=inside, other=0.0).to(tl.float32)
    toward_bias = tl.load(v_bias + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * r
    aligned = v_g - (sum_v * sum_g + v_xhat * g_xhat) * over
    along_v = -scale * r * g_xhat * over
    along_g = r * toward_weight - scale * r * v_xhat * over
    along_xhat = -(scale * r * aligned + along_v * v_xhat + along_g * g_xhat) * over
    target = factors + column
    tl.store(target, along_v, mask=inside)
    tl.store(target + channels, along_g, mask=inside)
    tl.store(target + 2 * channels, along_xhat, mask=inside)
    tl.store(target + 3 * channels, -(along_v * sum_v + along_g * sum_g) * over, mask=inside)
    tl.store(target + 4 * channels, scale, mask=inside)
    tl.store(target + 5 * channels, toward_weight - scale * v_xhat * over, mask=inside)
    tl.store(target + 6 * channels, toward_bias - scale * sum_v * over, mask=inside)
    tl.store(for_weight + column, r * aligned, mask=inside)


@triton.jit
def _combination(
    v, g, x, mean, rstd, factors, for_g, for_x, count, channels, rows: tl.constexpr, columns: tl.constexpr
):
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < channels
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    place = row[:, None].to(tl.int64) * channels + column[None, :]
    known = (row[:, None] < count) & inside[None, :]
    v_here = tl.load(v + place, mask=known, other=0.0).to(tl.float32)
    g_here = tl.load(g + place, mask=known, other=0.0).to(tl.float32)
    centre = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    scale = tl.load(rstd + column, mask=inside, other=0.0)[None, :]
    xhat = (tl.load(x + place, mask=known, other=0.0).to(tl.float32) - centre) * scale
    source = factors + column
    along_v = tl.load(source, mask=inside, other=0.0)[None, :]
    along_g = tl.load(source + channels, mask=inside, other=0.0)[None, :]
    along_xhat = tl.load(source + 2 * channels, mask=inside, other=0.0)[None, :]
    constant = tl.load(source + 3 * channels, mask=inside, other=0.0)[None, :]
    result = along_v * v_here + along_g * g_here + along_xhat * xhat + constant
    tl.store(for_x + place, result.to(for_x.dtype.element_ty), mask=known)
    along_v = tl.load(source + 4 * channels, mask=inside, other=0.0)[None, :]
    along_xhat = tl.load(source + 5 * channels, mask=inside, other=0.0)[None, :]
    constant = tl.load(source + 6 * channels, mask=inside, other=0.0)[None, :]
    result = along_v * v_here + along_xhat * xhat + constant
    tl.store(for_g + place, result.to(for_g.dtype.element_ty), mask=known)


def second_derivatives(
    v: Tensor, v_weight: Tensor, v_bias: Tensor, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `normalisation.second_derivatives`, for images [B, C, H, W]."""
    v, g, x = (values.contiguous(memory_format=torch.channels_last) for values in (v, g, x))
    channels = x.shape[1]
    count = x.numel() // channels
    tiles = triton.cdiv(count, ROWS)
    rows_a_part = triton.cdiv(tiles, MOST_PARTS) * ROWS
    parts = triton.cdiv(count, rows_a_part)
    across = triton.cdiv(channels, COLUMNS)
    partial = torch.empty(5, parts, channels, device=x.device)
    factors = torch.empty(7, channels, device=x.device)
    for_g, for_x, for_weight = torch.empty_like(g), torch.empty_like(x), torch.empty_like(weight)
    _sums[across, parts](
        v, g, x, mean, rstd, partial, count, channels, rows_a_part, rows=ROWS, columns=COLUMNS
    )  # fmt: skip
    _coefficients[(across,)](
        partial, weight, rstd, v_weight, v_bias, factors, for_weight, count, parts, channels,
        columns=COLUMNS, most=MOST_PARTS,
    )  # fmt: skip
    _combination[tiles, across](
        v, g, x, mean, rstd, factors, for_g, for_x, count, channels, rows=ROWS, columns=COLUMNS
    )  # fmt: skip
    return for_g, for_x, for_weight
