"""Launches of the kernels of BatchNorm: how rows and channels are dealt out to programs, and room for the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from elle.models import batch_norm_kernels as kernels


@dataclass(frozen=True)
class Adding:
    """How a kernel that adds up deals out its work: each thread reads 16 bytes of one row at a time."""

    columns: int
    """Channels of a program; half as many where that divides them and this does not."""
    loads: int
    """So many loads a thread has under way at most, of all arrays together."""
    warps: int
    programs: int
    """As many at least, if there are rows enough; each has loads * warps * 512 bytes under way."""


@dataclass(frozen=True)
class Writing:
    """How a kernel that writes deals out its work: tiles of `rows` x `columns`, one a program."""

    rows: int
    columns: int
    warps: int


STATISTICS = Adding(32, 4, 8, 256)
SUMS = Adding(32, 8, 16, 128)
WRITING = Writing(32, 128, 4)
"""Best of several on an H200, for few rows and for many; benchmarks/normalisation.py compares them."""
FEW = Adding(16, 8, 16, 1)
FEW_ROWS = 2048
"""So few are added up by one program for each block of channels: merging parts would take longer than they do."""


@dataclass(frozen=True)
class Running:
    """The buffers of a layer that a forward moves."""

    mean: Tensor
    var: Tensor
    batches: Tensor | None
    momentum: float


class _Adders:
    """Programs that add up over the rows of x, a part of them each, and read `arrays` arrays of its shape."""

    def __init__(self, x: Tensor, arrays: int, tiles: Adding | None, usual: Adding) -> None:
        channels, count = x.shape[1], x.numel() // x.shape[1]
        tiles = tiles or (FEW if count <= FEW_ROWS else usual)
        columns = _columns(channels, tiles.columns)
        rows = 32 * tiles.warps * 16 // (columns * x.element_size())
        across = triton.cdiv(channels, columns)
        rows_a_part = triton.cdiv(triton.cdiv(count, triton.cdiv(tiles.programs, across)), rows) * rows
        parts = triton.cdiv(count, rows_a_part)
        unroll = 1 << (max(tiles.loads // arrays, 1).bit_length() - 1)
        self.grid = (across * parts,)
        self.size = (count, channels, parts, rows_a_part)
        self.shape = {"rows": rows, "columns": columns, "unroll": unroll, "alone": parts == 1, "num_warps": tiles.warps}
        self.shape["follows"] = _follows(x.device)
        self.partial = torch.empty(2, parts, channels, dtype=torch.float32, device=x.device)


class _Writers:
    """Programs that write results of the shape of x, a tile each."""

    def __init__(self, x: Tensor, tiles: Writing | None) -> None:
        channels, count = x.shape[1], x.numel() // x.shape[1]
        tiles = tiles or WRITING
        columns = _columns(channels, tiles.columns)
        self.grid = (triton.cdiv(channels, columns) * triton.cdiv(count, tiles.rows),)
        self.size = (count, channels)
        self.shape = {"rows": tiles.rows, "columns": columns, "num_warps": tiles.warps}

    def after_adders(self, x: Tensor, ready: bool) -> dict[str, int]:
        """For the second kernel of a pair; `ready`: what it reads was there before the first."""
        return self.shape | ({"follows": True, "ready": ready, "launch_pdl": True} if _follows(x.device) else ALONE)


ALONE = {"follows": False, "ready": False}


@functools.cache
def _follows(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it waits for has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _columns(channels: int, most: int) -> int:
    whole = min(most, triton.next_power_of_2(channels))
    return int(whole // 2 if channels % whole and not channels % (whole // 2) else whole)


def arrivals(channels: int, device: torch.device) -> Tensor:
    """Counters for `statistics` and `sums` of one layer, which leave them at 0; two at a time must not share."""
    return torch.zeros(channels, dtype=torch.int32, device=device)


def statistics(
    x: Tensor, running: Running, eps: float, arrivals: Tensor, *,
    before: Tensor | None = None, tiles: Adding | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x + before, and the mean and rstd of its channels."""
    adders = _Adders(x, 1 if before is None else 2, tiles, STATISTICS)
    total = x if before is None else torch.empty_like(x)
    mean, rstd = torch.empty_like(running.mean), torch.empty_like(running.mean)
    moved = (running.mean, running.var, running.batches, eps, running.momentum)
    kernels.add_statistics[adders.grid](
        x, before, total, adders.partial, arrivals, mean, rstd, *moved, *adders.size, **adders.shape
    )  # fmt: skip
    return total, mean, rstd


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, *, relu: bool,
    after: Tensor | None = None, ready: bool = False, tiles: Writing | None = None,
) -> Tensor:  # fmt: skip
    """y = activation(w xhat + b + after), behind `statistics`; `ready`: x was there before those."""
    writers, y = _Writers(x, tiles), torch.empty_like(x)
    layer = (mean, rstd, weight, bias, None)
    kernels.write_normalised[writers.grid](
        x, None, after, None, y, *layer, *writers.size, relu=relu, **writers.after_adders(x, ready)
    )  # fmt: skip
    return y


def sums(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, arrivals: Tensor, *, relu: bool,
    y: Tensor | None = None, also: Tensor | None = None, tiles: Adding | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of weight and bias, and, where y tells the mask or there is `also`, g behind it; else g itself."""
    adders = _Adders(x, 2 + (y is not None) + (also is not None), tiles, SUMS)
    masked = g if y is None and also is None else torch.empty_like(x)
    for_weight, for_bias = torch.empty_like(weight), torch.empty_like(bias)
    kernels.add_gradients[adders.grid](
        g, also, x, y, masked, adders.partial, arrivals, for_bias, for_weight, mean, rstd, weight, bias, *adders.size,
        relu=relu, **adders.shape,
    )  # fmt: skip
    return for_weight, for_bias, masked


def gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, for_weight: Tensor,
    for_bias: Tensor, *, relu: bool, for_total: Tensor | None = None, ready: bool = False,
    tiles: Writing | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of x, by those of weight and bias; for_total is what x has from elsewhere.

    Behind `sums`; `ready`: g was there before those.
    """
    writers, for_x = _Writers(x, tiles), torch.empty_like(x)
    kernels.write_gradient[writers.grid](
        g, x, for_total, for_x, for_bias, for_weight, mean, rstd, weight, bias, *writers.size,
        relu=relu, **writers.after_adders(x, ready),
    )  # fmt: skip
    return for_x


def evaluated(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float, *, relu: bool,
    before: Tensor | None = None, after: Tensor | None = None, keep_sum: bool = False, tiles: Writing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """In eval mode y = activation(BatchNorm(x + before) + after), and if it is to be kept x + before."""
    writers, y = _Writers(x, tiles), torch.empty_like(x)
    total = torch.empty_like(x) if keep_sum and before is not None else None
    layer = (mean, variance, weight, bias, eps)
    kernels.write_normalised[writers.grid](
        x, before, after, total, y, *layer, *writers.size, relu=relu, **ALONE, **writers.shape
    )  # fmt: skip
    return y, x if before is None else total


def evaluated_gradients(
    g: Tensor, weight: Tensor, variance: Tensor, eps: float, *, y: Tensor | None = None,
    also: Tensor | None = None, for_total: Tensor | None = None, keep_masked: bool = False,
    tiles: Writing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In eval mode the gradient of x, and, if it is to be kept, that of `after`: g + also behind the mask y tells."""
    writers, for_x = _Writers(g, tiles), torch.empty_like(g)
    masked = torch.empty_like(g) if keep_masked and (y is not None or also is not None) else None
    kernels.write_scaled[writers.grid](
        g, also, y, for_total, for_x, masked, variance, weight, eps, *writers.size, **writers.shape
    )  # fmt: skip
    return for_x, g if masked is None else masked
