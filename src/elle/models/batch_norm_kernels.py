"""BatchNorm in train mode with a sum and a ReLU as GPU kernels: two forward, two backward.

Activations [N, C, H, W] with the channels last are `count` = N H W rows of C values, in float16, bfloat16 or float32;
everything is added up in float32. The first kernel of a pair splits the rows of a channel into parts and adds up each;
the last program to arrive (or a kernel of its own) merges the parts, always in the same order; the second kernel
reads the result. With xhat = (x - mean) * rstd and g the gradient of y = w xhat + b behind the ReLU's mask, the
gradients are sum(g) for b, sum(g xhat) for w, and w rstd (g - mean(g) - xhat mean(g xhat)) for x.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """How rows and channels are dealt out to programs."""

    rows: int
    """Rows that a program holds at a time."""
    columns: int
    """Channels of a program; half as many where that divides them and this does not."""
    warps: int
    programs: int
    """As many at least add up, if there are rows enough: some for each multiprocessor."""
    last_merges: bool = True
    """The last program to arrive merges the parts; otherwise a kernel of its own does."""


MOST_PARTS = 256
"""Into so many parts at most the rows are split: one program merges them all."""
TILES = ((16_384, Tiles(128, 64, 8, 256)), (0, Tiles(64, 64, 4, 256)))
"""(from so many rows on, these tiles): guesses for 132 multiprocessors; benchmarks/normalisation.py compares others."""


@dataclass(frozen=True)
class Running:
    """The buffers of a layer that a forward moves."""

    mean: Tensor
    var: Tensor
    batches: Tensor | None
    momentum: float


@triton.jit
def _channels(channels, columns: tl.constexpr):
    """The channels of this program, and which of them there are."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    column = tl.max_contiguous(tl.multiple_of(column, columns), columns)
    return column, column < channels


@triton.jit
def _is_last(arrivals, parts):
    """Whether all other programs of these channels have written their part; for the last one all of it is visible."""
    tl.debug_barrier()  # of this program's threads; the atomic then publishes what all of them have written
    return tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == parts - 1


@triton.jit
def _affine(x, mean, rstd, weight, bias):
    """w xhat + b; backward and forward share it, so that they agree on the ReLU's mask."""
    return (x - mean) * (rstd * weight) + bias


@triton.jit
def _grown(mean, square, count, mean_here, square_here, here):
    """Mean and sum of squared distances from it, of `count` values and `here` more (Chan, Golub and LeVeque, 1983)."""
    step = mean_here - mean
    share = here / (count + here)
    return mean + step * share, square + square_here + step * step * (count * share)


@triton.jit(do_not_specialize=["count", "parts", "rows_a_part"])
def _merge_statistics(
    partial, mean, rstd, running_mean, running_var, batches, eps, momentum, count, channels, parts, rows_a_part,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """mean and rstd of partial[2, parts, channels], means and sums of squared distances from them; the buffers move."""
    column, inside = _channels(channels, columns)
    centre = tl.zeros([columns], tl.float32)
    square = tl.zeros([columns], tl.float32)
    for start in range(0, parts, rows):
        part = start + tl.arange(0, rows)
        known = (part < parts)[:, None] & inside[None, :]
        place = part[:, None] * channels + column[None, :]
        # Past the first cache, which another program's writes do not reach.
        means = tl.load(partial + place, mask=known, other=0.0, cache_modifier=".cg")
        squares = tl.load(partial + parts * channels + place, mask=known, other=0.0, cache_modifier=".cg")
        size = tl.where(part < parts, tl.minimum(rows_a_part, count - part * rows_a_part), 0).to(tl.float32)
        here = tl.sum(size, 0)
        mean_here = tl.sum(means * size[:, None], 0) / here
        away = means - mean_here[None, :]
        square_here = tl.sum(squares + size[:, None] * away * away, 0)
        before = (start * rows_a_part).to(tl.float32)
        centre, square = _grown(centre, square, before, mean_here, square_here, here)
    tl.store(mean + column, centre, mask=inside)
    tl.store(rstd + column, 1.0 / tl.sqrt_rn(square / count + eps), mask=inside)
    old = tl.load(running_mean + column, mask=inside, other=0.0)
    tl.store(running_mean + column, momentum * centre + (1.0 - momentum) * old, mask=inside)
    old = tl.load(running_var + column, mask=inside, other=0.0)
    tl.store(running_var + column, momentum * (square / (count - 1)) + (1.0 - momentum) * old, mask=inside)
    if batches is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["count", "parts", "rows_a_part"])
def _statistics(
    x, addend, total, partial, arrivals, mean, rstd, running_mean, running_var, batches, eps, momentum,
    count, channels, parts, rows_a_part,
    rows: tl.constexpr, columns: tl.constexpr, last_merges: tl.constexpr,
):  # fmt: skip
    """The statistics of x, or of total = x + addend, which is written; tile by tile."""
    column, inside = _channels(channels, columns)
    part = tl.program_id(1)
    first = part * rows_a_part
    end = tl.minimum(first + rows_a_part, count)
    centre = tl.zeros([columns], tl.float32)
    square = tl.zeros([columns], tl.float32)
    for start in range(first, end, rows):
        row = start + tl.arange(0, rows)
        place = row[:, None] * channels + column[None, :]
        known = (row < end)[:, None] & inside[None, :]
        values = tl.load(x + place, mask=known, other=0.0)
        if addend is not None:
            values = values.to(tl.float32) + tl.load(addend + place, mask=known, other=0.0).to(tl.float32)
            values = values.to(total.dtype.element_ty)  # the statistics are those of what is kept
            tl.store(total + place, values, mask=known)
        values = values.to(tl.float32)
        here = tl.minimum(rows, end - start).to(tl.float32)
        mean_here = tl.sum(values, 0) / here
        away = tl.where(known, values - mean_here[None, :], 0.0)
        before = (start - first).to(tl.float32)
        centre, square = _grown(centre, square, before, mean_here, tl.sum(away * away, 0), here)
    target = partial + part * channels + column
    tl.store(target, centre, mask=inside)
    tl.store(target + parts * channels, square, mask=inside)
    if last_merges:  # noqa: SIM102  # known when compiled; `and` would compute both
        if _is_last(arrivals, parts):
            _merge_statistics(
                partial, mean, rstd, running_mean, running_var, batches, eps, momentum,
                count, channels, parts, rows_a_part, rows, columns,
            )  # fmt: skip
            tl.store(arrivals + tl.program_id(0), 0)  # for the next kernel


@triton.jit(do_not_specialize=["count"])
def _normalise(
    x, addend, y, mean, rstd, weight, bias, count, channels,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """y = w xhat + b, plus the addend where there is one, behind a ReLU if asked."""
    column, inside = _channels(channels, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    place = row[:, None] * channels + column[None, :]
    known = (row < count)[:, None] & inside[None, :]
    centre = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    r = tl.load(rstd + column, mask=inside, other=0.0)[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0)[None, :]
    b = tl.load(bias + column, mask=inside, other=0.0)[None, :]
    result = _affine(tl.load(x + place, mask=known, other=0.0).to(tl.float32), centre, r, w, b)
    if addend is not None:
        result += tl.load(addend + place, mask=known, other=0.0).to(tl.float32)
    if relu:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's
    tl.store(y + place, result.to(y.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["parts"])
def _merge_sums(partial, for_bias, for_weight, channels, parts, rows: tl.constexpr, columns: tl.constexpr):
    """The sums over partial[2, parts, channels]."""
    column, inside = _channels(channels, columns)
    sum_g = tl.zeros([columns], tl.float32)
    g_xhat = tl.zeros([columns], tl.float32)
    for start in range(0, parts, rows):
        part = start + tl.arange(0, rows)
        known = (part < parts)[:, None] & inside[None, :]
        place = part[:, None] * channels + column[None, :]
        sum_g += tl.sum(tl.load(partial + place, mask=known, other=0.0, cache_modifier=".cg"), 0)
        place += parts * channels
        g_xhat += tl.sum(tl.load(partial + place, mask=known, other=0.0, cache_modifier=".cg"), 0)
    tl.store(for_bias + column, sum_g, mask=inside)
    tl.store(for_weight + column, g_xhat, mask=inside)


@triton.jit(do_not_specialize=["count", "parts", "rows_a_part"])
def _gradient_sums(
    g, x, y, masked, partial, arrivals, for_bias, for_weight, mean, rstd, weight, bias,
    count, channels, parts, rows_a_part,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, last_merges: tl.constexpr,
):  # fmt: skip
    """sum(g) and sum(g xhat) behind the ReLU's mask, which x tells, or else y; g is then written, masked."""
    column, inside = _channels(channels, columns)
    part = tl.program_id(1)
    first = part * rows_a_part
    end = tl.minimum(first + rows_a_part, count)
    centre = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    r = tl.load(rstd + column, mask=inside, other=0.0)[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0)[None, :]
    b = tl.load(bias + column, mask=inside, other=0.0)[None, :]
    sum_g = tl.zeros([columns], tl.float32)
    g_xhat = tl.zeros([columns], tl.float32)
    for start in range(first, end, rows):
        row = start + tl.arange(0, rows)
        place = row[:, None] * channels + column[None, :]
        known = (row < end)[:, None] & inside[None, :]
        here = tl.load(g + place, mask=known, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        if y is not None:
            here = tl.where(tl.load(y + place, mask=known, other=0.0) > 0.0, here, 0.0)
            tl.store(masked + place, here.to(masked.dtype.element_ty), mask=known)
        elif relu:
            here = tl.where(_affine(values, centre, r, w, b) > 0.0, here, 0.0)
        sum_g += tl.sum(here, 0)
        g_xhat += tl.sum(here * ((values - centre) * r), 0)  # outside of the array g is 0
    target = partial + part * channels + column
    tl.store(target, sum_g, mask=inside)
    tl.store(target + parts * channels, g_xhat, mask=inside)
    if last_merges:  # noqa: SIM102  # known when compiled; `and` would compute both
        if _is_last(arrivals, parts):
            _merge_sums(partial, for_bias, for_weight, channels, parts, rows, columns)
            tl.store(arrivals + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["count"])
def _gradient(
    g, x, for_total, for_x, for_bias, for_weight, mean, rstd, weight, bias, count, channels,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """w rstd (g - mean(g) - xhat mean(g xhat)), plus the gradient that x has from elsewhere, where there is one."""
    column, inside = _channels(channels, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    place = row[:, None] * channels + column[None, :]
    known = (row < count)[:, None] & inside[None, :]
    centre = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    r = tl.load(rstd + column, mask=inside, other=0.0)[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0)[None, :]
    b = tl.load(bias + column, mask=inside, other=0.0)[None, :]
    mean_g = tl.load(for_bias + column, mask=inside, other=0.0)[None, :] / count
    mean_g_xhat = tl.load(for_weight + column, mask=inside, other=0.0)[None, :] / count
    here = tl.load(g + place, mask=known, other=0.0).to(tl.float32)
    values = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    if relu:
        here = tl.where(_affine(values, centre, r, w, b) > 0.0, here, 0.0)
    result = (r * w) * (here - mean_g - (values - centre) * r * mean_g_xhat)
    if for_total is not None:
        result += tl.load(for_total + place, mask=known, other=0.0).to(tl.float32)
    tl.store(for_x + place, result.to(for_x.dtype.element_ty), mask=known)


class _Plan:
    """Tiles laid over `count` rows of `channels` channels."""

    def __init__(self, x: Tensor, tiles: Tiles | None) -> None:
        self.channels = x.shape[1]
        self.count = x.numel() // self.channels
        self.tiles = tiles = tiles or next(tiles for least, tiles in TILES if self.count >= least)
        whole = min(tiles.columns, triton.next_power_of_2(self.channels))
        self.columns = whole // 2 if self.channels % whole and not self.channels % (whole // 2) else whole
        self.across = triton.cdiv(self.channels, self.columns)
        parts = min(MOST_PARTS, triton.cdiv(tiles.programs, self.across))
        self.rows_a_part = triton.cdiv(triton.cdiv(self.count, parts), tiles.rows) * tiles.rows
        self.parts = triton.cdiv(self.count, self.rows_a_part)
        self.shape = {"rows": tiles.rows, "columns": self.columns, "num_warps": tiles.warps}
        self.adding = self.shape | {"last_merges": tiles.last_merges}

    def partial(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.parts, self.channels, dtype=torch.float32, device=x.device)

    @property
    def adders(self) -> tuple[int, int]:
        return self.across, self.parts

    @property
    def writers(self) -> tuple[int, int]:
        return self.across, triton.cdiv(self.count, self.tiles.rows)


def arrivals(channels: int, device: torch.device) -> Tensor:
    """Counters for `normalised` and `gradients` of one layer, which leave them at 0; two at a time must not share."""
    return torch.zeros(channels, dtype=torch.int32, device=device)


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, running: Running, eps: float, arrivals: Tensor, *, relu: bool,
    before: Tensor | None = None, after: Tensor | None = None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y = activation(BatchNorm(x + before) + after), with x + before and the mean and rstd of its channels."""
    plan = _Plan(x, tiles)
    y, partial = torch.empty_like(x), plan.partial(x)
    total = x if before is None else torch.empty_like(x)
    mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
    found = (mean, rstd, running.mean, running.var, running.batches, eps, running.momentum)
    size = (plan.count, plan.channels, plan.parts, plan.rows_a_part)
    _statistics[plan.adders](x, before, total, partial, arrivals, *found, *size, **plan.adding)
    if not plan.tiles.last_merges:
        _merge_statistics[(plan.across,)](partial, *found, *size, **plan.shape)
    _normalise[plan.writers](total, after, y, mean, rstd, weight, bias, *size[:2], relu=relu, **plan.shape)
    return y, total, mean, rstd


def gradients(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, arrivals: Tensor, *, relu: bool,
    y: Tensor | None = None, for_total: Tensor | None = None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x, the weight, the bias, and of `after`, for which y must be given; x is the sum where there was `before`."""
    plan = _Plan(x, tiles)
    partial, for_x, for_after = plan.partial(x), torch.empty_like(x), g if y is None else torch.empty_like(x)
    for_weight, for_bias = torch.empty_like(weight), torch.empty_like(bias)
    layer = (mean, rstd, weight, bias)
    size = (plan.count, plan.channels, plan.parts, plan.rows_a_part)
    sums = (partial, arrivals, for_bias, for_weight)
    _gradient_sums[plan.adders](g, x, y, for_after, *sums, *layer, *size, relu=relu, **plan.adding)
    if not plan.tiles.last_merges:
        _merge_sums[(plan.across,)](partial, for_bias, for_weight, plan.channels, plan.parts, **plan.shape)
    # With an addend behind, what was written has passed the mask already.
    masked = relu and y is None
    _gradient[plan.writers](
        for_after, x, for_total, for_x, for_bias, for_weight, *layer, *size[:2], relu=masked, **plan.shape
    )  # fmt: skip
    return for_x, for_weight, for_bias, for_after
