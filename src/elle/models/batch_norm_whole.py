"""BatchNorm of few rows in train mode, one kernel either way: a program holds all rows of its channels.

What `batch_norm_kernels` does in two launches, the second of which waits for the first and reads all values again. The
formulas are those described there; the squared distances are from the mean itself.
"""

import triton
import triton.language as tl

from elle.models.batch_norm_kernels import (
    _affine,
    _both,
    _channels,
    _loaded,
    _moved,
    _of_channels,
    _read,
    _rows,
    _rstd,
    _summed,
)


@triton.jit(do_not_specialize=["count"])
def normalise(
    x, before, after, total, y, mean, rstd, running_mean, running_var, batches, weight, bias, eps, momentum,
    count, channels, relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """y, the statistics of x or of total = x + before, which is written, and the layer's buffers moved by them."""
    column, inside = _channels(channels, columns)
    place, known = _rows(0, count, channels, column, inside, rows)
    values = _summed(x, before, place, known)
    pivot = _summed(x, before, column, inside)
    old_mean = tl.load(running_mean + column, mask=inside, other=0.0)
    old_var = tl.load(running_var + column, mask=inside, other=0.0)
    w, b = _of_channels(weight, column, inside), _of_channels(bias, column, inside)
    if before is not None:
        tl.store(total + place, values.to(total.dtype.element_ty), mask=known)
    # By distances from the first value, so that a large mean costs no digits.
    away = tl.where(known, values - pivot[None, :], 0.0)
    step = tl.sum(away, 0) / count
    centre = pivot + step
    away = tl.where(known, away - step[None, :], 0.0)
    square = tl.sum(away * away, 0)
    r = _rstd(square / count, eps)
    tl.store(mean + column, centre, mask=inside)
    tl.store(rstd + column, r, mask=inside)
    _moved(running_mean, old_mean, centre, momentum, column, inside)
    _moved(running_var, old_var, square / (count - 1), momentum, column, inside)
    if batches is not None and tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
    result = _affine(values, centre[None, :], r[None, :], w, b)
    if after is not None:
        result += _read(after, place, known)
    if relu:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's
    tl.store(y + place, result.to(y.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["count"])
def differentiate(
    g, also, x, y, masked, for_total, for_x, for_bias, for_weight, mean, rstd, weight, bias, count, channels,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The gradients of x, weight and bias; g behind the mask is written if y tells that, or g comes in two parts."""
    column, inside = _channels(channels, columns)
    place, known = _rows(0, count, channels, column, inside, rows)
    here = _summed(g, also, place, known)
    values = _read(x, place, known)
    centre, r = _of_channels(mean, column, inside), _of_channels(rstd, column, inside)
    w, b = _of_channels(weight, column, inside), _of_channels(bias, column, inside)
    if y is not None:
        here = tl.where(_loaded(y, place, known) > 0.0, here, 0.0)
    elif relu:
        here = tl.where(_affine(values, centre, r, w, b) > 0.0, here, 0.0)
    if y is not None or also is not None:
        tl.store(masked + place, here.to(masked.dtype.element_ty), mask=known)
    distance = values - centre
    sum_g, g_xhat = _both(here, here * distance * r)  # outside of the array g is 0
    tl.store(for_bias + column, sum_g, mask=inside)
    tl.store(for_weight + column, g_xhat, mask=inside)
    share = r * w * (1.0 / count)
    result = (r * w) * here - (share * r * g_xhat[None, :] * distance + share * sum_g[None, :])
    if for_total is not None:
        result += _read(for_total, place, known)
    tl.store(for_x + place, result.to(for_x.dtype.element_ty), mask=known)
