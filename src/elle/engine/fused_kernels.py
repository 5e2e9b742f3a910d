"""A step's small arithmetic as GPU kernels, each instead of a chain of launches; `fused` launches them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "factor"])
def write_cross_entropy(
    logits, y, slope, loss, rows, classes, factor, block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """`factor` times the sum of all rows' cross-entropies, if it is asked for, and the gradient of that."""
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
        wanted = tl.where(own, 1.0, 0.0)
        tl.store(
            slope + place, (factor * (powers / sums[:, None] - wanted)).to(slope.dtype.element_ty), mask=inside
        )  # fmt: skip
        if loss is not None:
            total += tl.where(known, tl.log(sums) - tl.sum(tl.where(own, values, 0.0), 1), 0.0)
    if loss is not None:
        tl.store(loss, factor * tl.sum(total))
