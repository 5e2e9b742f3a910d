"""BatchNorm with a sum and a ReLU as GPU kernels; `batch_norm_launches` calls them.

Activations [N, C, H, W] with the channels last are `count` = N H W rows of C values, in float16, bfloat16 or float32;
everything is added up in float32. In train mode there are two kernels forward and two backward: the first of a pair
adds up, the second writes. In eval mode one kernel writes either way.

A kernel that adds up splits the rows into parts, one a program. A program goes through its part in chunks of
`unroll` tiles of `rows` rows; it keeps one sum for each of a tile's `rows` x `columns` places and adds up over the
places only in the end, so that its loop waits for nothing but memory: all loads of a chunk are under way together. The
last program to arrive merges the parts, always in the same order. Of few rows there is one part, and no merging.

Where `follows` is given, the second kernel of a pair is launched while the first still merges (programmatic dependent
launch, from Hopper on): it loads what is `ready` by then, and waits for the first to end before it reads its results.

With xhat = (x - mean) * rstd and g the gradient of y = w xhat + b behind the ReLU's mask, the gradients are sum(g) for
b, sum(g xhat) for w, and w rstd (g - mean(g) - xhat mean(g xhat)) for x; in eval mode, w rstd g. Where y goes two ways,
g comes in two parts, `g` and `also`, which the first kernel to read them adds up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PARTS_AT_ONCE: tl.constexpr = tl.constexpr(128)
"""So many parts are merged by one round of loads."""


@triton.jit
def _blocks(channels, columns: tl.constexpr):
    """Which of the blocks of channels is this program's, and which of the blocks of rows.

    One number tells both, since a grid's second axis has no more than 65,535 programs.
    """
    blocks = tl.cdiv(channels, columns)
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


@triton.jit
def _channels(channels, columns: tl.constexpr):
    """The channels of this program, and which of them there are."""
    block, _ = _blocks(channels, columns)
    column = block * columns + tl.arange(0, columns)
    column = tl.max_contiguous(tl.multiple_of(column, columns), columns)
    return column, column < channels


@triton.jit
def _of_channels(values, column, inside):
    """The values of these channels, beside a tile."""
    return tl.load(values + column, mask=inside, other=0.0)[None, :]


@triton.jit
def _part(channels, count, rows_a_part, columns: tl.constexpr):
    """Which part is this program's, and its rows, from the first to the end."""
    _, part = _blocks(channels, columns)
    first = part * rows_a_part
    return part, first, tl.minimum(first + rows_a_part, count)


@triton.jit
def _rows(start, end, channels, column, inside, rows: tl.constexpr):
    """Places of `rows` rows, and which of them there are."""
    row = start + tl.arange(0, rows)
    return row[:, None] * channels + column[None, :], (row < end)[:, None] & inside[None, :]


@triton.jit
def _chunk(start, end, channels, column, inside, rows: tl.constexpr, unroll: tl.constexpr):
    """`_rows`, so many times."""
    places, known = (), ()
    for tile in tl.static_range(unroll):
        place, there = _rows(start + tile * rows, end, channels, column, inside, rows)
        places, known = places + (place,), known + (there,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton knows no unpacking
    return places, known


@triton.jit
def _tile(channels, count, column, inside, rows: tl.constexpr, columns: tl.constexpr):
    """Places of the rows that this program writes, and which of them there are."""
    _, block = _blocks(channels, columns)
    row = block * rows + tl.arange(0, rows)
    return row[:, None] * channels + column[None, :], (row < count)[:, None] & inside[None, :]


@triton.jit
def _loaded(values, place, known):
    return tl.load(values + place, mask=known, other=0.0)


@triton.jit
def _all_loaded(values, places, known):
    """What is at these places, as it is kept: converting would keep loads from being under way together."""
    held = ()
    if values is not None:
        for tile in tl.static_range(len(places)):
            held += (_loaded(values, places[tile], known[tile]),)  # type: ignore[assignment]
    return held


@triton.jit
def _read(values, place, known):
    return _loaded(values, place, known).to(tl.float32)


@triton.jit
def _sum(x, addend):
    """x + addend as it is kept, rounded to x's type."""
    return (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _summed(x, addend, place, known):
    """x + addend where there is an addend; else x."""
    if addend is None:
        return _read(x, place, known)
    else:  # what a compiled function returns has one type
        return _sum(_loaded(x, place, known), _loaded(addend, place, known))


@triton.jit
def _is_last(counter, parts):
    """Whether all other programs of these channels have written their part; for the last one all of it is visible."""
    tl.debug_barrier()  # of this program's threads; the atomic then publishes what all of them have written
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1


@triton.jit
def _affine(x, mean, rstd, weight, bias):
    """w xhat + b; backward and forward share it, so that they agree on the ReLU's mask."""
    return (x - mean) * (rstd * weight) + bias


@triton.jit
def _rstd(spread, eps):
    """1 / sqrt(variance + eps) where eps is given; otherwise `spread` is already that."""
    if eps is not None:
        spread = tl.rsqrt(spread + eps)
    return spread


@triton.jit
def _both(first, second):
    """The sums over the rows of two tiles, by one reduction: its barriers are what it costs."""
    return tl.split(tl.sum(tl.join(first, second), 0))


@triton.jit
def _added_distances(distance, square, size):
    """What rows add to the sum and to the sum of squares of all distances from one value.

    Of each row: how far its mean is from that value, its squared distances from its mean, and how many values it has.
    """
    size = size[:, None]
    return _both(size * distance, square + size * distance * distance)


@triton.jit
def _settled(pivot, total, square, count):
    """The mean, and the sum of squared distances from it, by sums of `count` distances from the pivot."""
    step = total / count
    # Rounding may leave equal values with a little less than nothing.
    return pivot + step, tl.maximum(square - total * step, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _merged_statistics(partial, column, inside, count, channels, parts, rows_a_part, columns: tl.constexpr):
    """The mean and the squared distances from it, by those of partial[2, parts, channels]."""
    # Past the first cache, which another program's writes do not reach.
    pivot = tl.load(partial + column, mask=inside, other=0.0, cache_modifier=".cg")
    total = tl.zeros([columns], tl.float32)
    square = tl.zeros([columns], tl.float32)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + tl.arange(0, PARTS_AT_ONCE)
        known = (part < parts)[:, None] & inside[None, :]
        place = part[:, None] * channels + column[None, :]
        means = tl.load(partial + place, mask=known, other=0.0, cache_modifier=".cg")
        squares = tl.load(partial + parts * channels + place, mask=known, other=0.0, cache_modifier=".cg")
        size = tl.where(part < parts, tl.minimum(rows_a_part, count - part * rows_a_part), 0).to(tl.float32)
        total_here, square_here = _added_distances(means - pivot[None, :], squares, size)
        total += total_here
        square += square_here
    return _settled(pivot, total, square, count)


@triton.jit
def _moved(buffer, old, value, momentum, column, inside):
    tl.store(buffer + column, momentum * value + (1.0 - momentum) * old, mask=inside)


@triton.jit(do_not_specialize=["count", "parts", "rows_a_part"])
def add_statistics(
    x, addend, total, partial, arrivals, mean, rstd, running_mean, running_var, batches, eps, momentum,
    count, channels, parts, rows_a_part,
    rows: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr, alone: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """The statistics of x, or of total = x + addend, which is written; the layer's buffers move.

    Each place adds up distances d from the first of its n values, and their squares; the places are then added up in
    the same way, by distances from the first value of all. The square of such a value's own distance from the mean
    is at most n times the variance, as it is one of the values, and on average once: so sum(d^2) - sum(d)^2 / n
    loses at most log2(n + 1) bits, on average one, however far the mean is from 0.
    """
    column, inside = _channels(channels, columns)
    block, _ = _blocks(channels, columns)
    part, first, end = _part(channels, count, rows_a_part, columns)
    # What will be needed in the end is under way from the beginning.
    old_mean = tl.load(running_mean + column, mask=inside, other=0.0)
    old_var = tl.load(running_var + column, mask=inside, other=0.0)
    if batches is not None:
        counted = tl.load(batches)
    pivot = _summed(x, addend, first * channels + column, inside)
    start_place, start_known = _rows(first, end, channels, column, inside, rows)
    shift = _summed(x, addend, start_place, start_known)
    sums = tl.zeros([rows, columns], tl.float32)
    squares = tl.zeros([rows, columns], tl.float32)
    for start in range(first, end, unroll * rows):
        places, known = _chunk(start, end, channels, column, inside, rows, unroll)
        of_x = _all_loaded(x, places, known)
        of_addend = _all_loaded(addend, places, known)
        for tile in tl.static_range(unroll):
            if addend is not None:
                values = _sum(of_x[tile], of_addend[tile])
                tl.store(total + places[tile], values.to(total.dtype.element_ty), mask=known[tile])
            else:
                values = of_x[tile].to(tl.float32)
            away = tl.where(known[tile], values - shift, 0.0)
            sums += away
            squares += away * away
    if follows:
        gdc_launch_dependents()
    size = tl.cdiv(tl.maximum(end - first - tl.arange(0, rows), 0), rows).to(tl.float32)
    step = sums * (1.0 / tl.maximum(size, 1.0))[:, None]
    distance = shift - pivot[None, :] + step
    sum_here, square = _added_distances(distance, tl.maximum(squares - sums * step, 0.0), size)
    centre, square = _settled(pivot, sum_here, square, end - first)
    last = True
    if not alone:
        target = partial + part * channels + column
        tl.store(target, centre, mask=inside)
        tl.store(target + parts * channels, square, mask=inside)
        last = _is_last(arrivals + block, parts)
    if last:
        if not alone:
            centre, square = _merged_statistics(
                partial, column, inside, count, channels, parts, rows_a_part, columns
            )  # fmt: skip
            tl.store(arrivals + block, 0)  # for the next kernel
        tl.store(mean + column, centre, mask=inside)
        tl.store(rstd + column, _rstd(square / count, eps), mask=inside)
        _moved(running_mean, old_mean, centre, momentum, column, inside)
        _moved(running_var, old_var, square / (count - 1), momentum, column, inside)
        if batches is not None and block == 0:
            tl.store(batches, counted + 1)


@triton.jit
def _merged_sums(partial, column, inside, channels, parts, columns: tl.constexpr):
    """The sums over partial[2, parts, channels]."""
    sum_g = tl.zeros([columns], tl.float32)
    g_xhat = tl.zeros([columns], tl.float32)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + tl.arange(0, PARTS_AT_ONCE)
        known = (part < parts)[:, None] & inside[None, :]
        place = part[:, None] * channels + column[None, :]
        of_g = tl.load(partial + place, mask=known, other=0.0, cache_modifier=".cg")
        of_g_xhat = tl.load(partial + parts * channels + place, mask=known, other=0.0, cache_modifier=".cg")
        sum_here, product_here = _both(of_g, of_g_xhat)
        sum_g += sum_here
        g_xhat += product_here
    return sum_g, g_xhat


@triton.jit(do_not_specialize=["count", "parts", "rows_a_part"])
def add_gradients(
    g, also, x, y, masked, partial, arrivals, for_bias, for_weight, mean, rstd, weight, bias,
    count, channels, parts, rows_a_part,
    relu: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr, alone: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """sum(g) and sum(g xhat) behind the ReLU's mask, which y tells if given, or else x.

    g behind the mask is written to `masked` if y is given, or another part of g.
    """
    column, inside = _channels(channels, columns)
    block, _ = _blocks(channels, columns)
    part, first, end = _part(channels, count, rows_a_part, columns)
    centre = _of_channels(mean, column, inside)
    r = _of_channels(rstd, column, inside)
    w = _of_channels(weight, column, inside)
    b = _of_channels(bias, column, inside)
    sums = tl.zeros([rows, columns], tl.float32)
    products = tl.zeros([rows, columns], tl.float32)
    for start in range(first, end, unroll * rows):
        places, known = _chunk(start, end, channels, column, inside, rows, unroll)
        of_g = _all_loaded(g, places, known)
        of_also = _all_loaded(also, places, known)
        of_x = _all_loaded(x, places, known)
        of_y = _all_loaded(y, places, known)
        for tile in tl.static_range(unroll):
            if also is not None:
                here = _sum(of_g[tile], of_also[tile])
            else:
                here = of_g[tile].to(tl.float32)
            values = of_x[tile].to(tl.float32)
            if y is not None:
                here = tl.where(of_y[tile] > 0.0, here, 0.0)
            elif relu:
                here = tl.where(_affine(values, centre, r, w, b) > 0.0, here, 0.0)
            if y is not None or also is not None:
                tl.store(masked + places[tile], here.to(masked.dtype.element_ty), mask=known[tile])
            sums += here
            products += here * (values - centre)  # outside of the array g is 0
    if follows:
        gdc_launch_dependents()
    sum_g, g_xhat = _both(sums, products * r)
    last = True
    if not alone:
        target = partial + part * channels + column
        tl.store(target, sum_g, mask=inside)
        tl.store(target + parts * channels, g_xhat, mask=inside)
        last = _is_last(arrivals + block, parts)
    if last:
        if not alone:
            sum_g, g_xhat = _merged_sums(partial, column, inside, channels, parts, columns)
            tl.store(arrivals + block, 0)
        tl.store(for_bias + column, sum_g, mask=inside)
        tl.store(for_weight + column, g_xhat, mask=inside)


@triton.jit(do_not_specialize=["count"])
def write_normalised(
    x, before, after, total, y, mean, spread, weight, bias, eps, count, channels,
    relu: tl.constexpr, follows: tl.constexpr, ready: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """y = w xhat + b of x, or of x + before; plus `after` where there is one, and behind a ReLU if asked.

    x + before is written to `total` if given. `spread` is the variance where eps is given, else already the rstd.
    """
    column, inside = _channels(channels, columns)
    place, known = _tile(channels, count, column, inside, rows, columns)
    w, b = _of_channels(weight, column, inside), _of_channels(bias, column, inside)
    if follows and not ready:
        gdc_wait()
    values = _summed(x, before, place, known)
    if follows and ready:
        gdc_wait()
    r = _rstd(_of_channels(spread, column, inside), eps)
    if total is not None:
        tl.store(total + place, values.to(total.dtype.element_ty), mask=known)
    result = _affine(values, _of_channels(mean, column, inside), r, w, b)
    if after is not None:
        result += _read(after, place, known)
    if relu:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's
    tl.store(y + place, result.to(y.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["count"])
def write_gradient(
    g, x, for_total, for_x, for_bias, for_weight, mean, rstd, weight, bias, count, channels,
    relu: tl.constexpr, follows: tl.constexpr, ready: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """w rstd (g - mean(g) - xhat mean(g xhat)), plus the gradient that x has from elsewhere, where there is one."""
    column, inside = _channels(channels, columns)
    place, known = _tile(channels, count, column, inside, rows, columns)
    centre, r = _of_channels(mean, column, inside), _of_channels(rstd, column, inside)
    w, b = _of_channels(weight, column, inside), _of_channels(bias, column, inside)
    if follows and not ready:
        gdc_wait()
    here = _read(g, place, known)
    values = _read(x, place, known)
    if follows and ready:
        gdc_wait()
    # Of each channel, so that a value costs two multiplications and additions.
    share = r * w * (1.0 / count)
    offset = share * _of_channels(for_bias, column, inside)
    slope = share * r * _of_channels(for_weight, column, inside)
    if relu:
        here = tl.where(_affine(values, centre, r, w, b) > 0.0, here, 0.0)
    result = (r * w) * here - (slope * (values - centre) + offset)
    if for_total is not None:
        result += _read(for_total, place, known)
    tl.store(for_x + place, result.to(for_x.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["count"])
def write_scaled(
    g, also, y, for_total, for_x, masked, variance, weight, eps, count, channels,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """In eval mode w rstd g behind the ReLU's mask, which y tells if given, plus what x has from elsewhere.

    The gradient behind the mask itself is written to `masked` if given.
    """
    column, inside = _channels(channels, columns)
    place, known = _tile(channels, count, column, inside, rows, columns)
    scale = _rstd(_of_channels(variance, column, inside), eps) * _of_channels(weight, column, inside)
    here = _summed(g, also, place, known)
    if y is not None:
        here = tl.where(_read(y, place, known) > 0.0, here, 0.0)
    if masked is not None:
        tl.store(masked + place, here.to(masked.dtype.element_ty), mask=known)
    result = here * scale
    if for_total is not None:
        result += _read(for_total, place, known)
    tl.store(for_x + place, result.to(for_x.dtype.element_ty), mask=known)
