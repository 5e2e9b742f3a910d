"""A step's small arithmetic as GPU kernels, each instead of a chain of launches; `fused` launches them."""

import triton
import triton.language as tl


@triton.jit
def write_step(
    x_adv, gradient, x, eps, result, count, alpha: tl.constexpr, project: tl.constexpr, clip: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """x_adv + alpha eps sign(gradient), which is 0 of what is no number; back in the ball around x and in [0, 1]."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    known = place < count
    radius = tl.load(eps)
    step = (alpha * radius).to(tl.float32)  # rounded once, as torch does
    g = tl.load(gradient + place, mask=known, other=0.0)
    point = tl.load(x_adv + place, mask=known, other=0.0)
    point += tl.where(g > 0.0, step, tl.where(g < 0.0, -step, 0.0))
    if project:
        centre = tl.load(x + place, mask=known, other=0.0)
        radius = radius.to(tl.float32)
        point = centre + tl.minimum(tl.maximum(point - centre, -radius), radius)
    if clip:
        point = tl.minimum(tl.maximum(point, 0.0), 1.0)
    tl.store(result + place, point, mask=known)


@triton.jit(do_not_specialize=["rows", "factor"])
def write_cross_entropy(
    logits, y, slope, loss, rows, classes, factor, smoothing: tl.constexpr, block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """`factor` times the sum of all rows' cross-entropies, if it is asked for, and the gradient of that.

    Of each label the share `smoothing` is spread over all classes.
    """
    column = tl.arange(0, columns)
    total = tl.zeros([block], tl.float32)
    for start in range(0, rows, block):
        row = start + tl.arange(0, block)
        known = row < rows
        place = row[:, None] * classes + column[None, :]
        inside = known[:, None] & (column < classes)[None, :]
        values = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.where((column < classes)[None, :], values, float("-inf"))
        own = column[None, :] == tl.load(y + row, mask=known, other=0)[:, None]
        values -= tl.max(values, 1)[:, None]
        powers = tl.exp(values)
        sums = tl.sum(powers, 1)
        wanted = tl.where(own, 1.0 - smoothing, 0.0)
        if smoothing > 0:
            wanted += smoothing / classes
        tl.store(
            slope + place, (factor * (powers / sums[:, None] - wanted)).to(slope.dtype.element_ty), mask=inside
        )  # fmt: skip
        if loss is not None:
            # Only of what is wanted: an infinite value times 0 is no number.
            if smoothing > 0:
                reached = tl.sum(tl.where((column < classes)[None, :], wanted * values, 0.0), 1)
            else:
                reached = tl.sum(tl.where(own, values, 0.0), 1)
            total += tl.where(known, tl.log(sums) - reached, 0.0)
    if loss is not None:
        tl.store(loss, factor * tl.sum(total))
