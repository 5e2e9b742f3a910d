"""Weights whose gradients are still in float16: their update as a GPU kernel, and whether a gradient overflows.

A program has a chunk of one tensor. Of each chunk there is, in `chunks`: the number of its tensor among the gradients,
its first element, how many elements it has, and where the weights and the momentum of that first one are. `sgd`
launches the kernels.
"""

import triton
import triton.language as tl

LARGEST: tl.constexpr = tl.constexpr(65504.0)
"""Of float16."""


@triton.jit
def _chunk(gradients, chunks, block: tl.constexpr):
    """The gradient of this program's chunk, the places of its elements, and which of them there are."""
    row = chunks + 5 * tl.program_id(0)
    number = tl.load(row)
    # Multiples of 8 all, so that a thread reads 16 bytes at a time.
    first, count = tl.multiple_of(tl.load(row + 1), 8), tl.multiple_of(tl.load(row + 2), 8)
    gradient = gradients[0]
    for other in tl.static_range(1, len(gradients)):
        gradient = tl.where(number == other, gradients[other], gradient)
    place = tl.arange(0, block)
    known = place < count
    return tl.load(gradient + first + place, mask=known, other=0.0).to(tl.float32), place, known


@triton.jit
def find_overflow(gradients, chunks, overflow, block: tl.constexpr):
    """Write 1 where a gradient is not finite."""
    g, _, _ = _chunk(gradients, chunks, block)
    if tl.sum(tl.where(tl.abs(g) <= LARGEST, 0, 1)) > 0:  # 1 of what is not a number, too
        tl.store(overflow, 1.0)


@triton.jit
def update_weights(
    gradients, chunks, lr, grad_scale, overflow, weight_decay, momentum, has_momentum: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Move weights and momentum, unless a gradient overflows."""
    if tl.load(overflow) == 0.0:
        g, place, known = _chunk(gradients, chunks, block)
        row = chunks + 5 * tl.program_id(0)
        weights = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
        speed = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), 16)
        w = tl.load(weights + place, mask=known, other=0.0)
        step = g / tl.load(grad_scale) + weight_decay * w
        if has_momentum:
            step += momentum * tl.load(speed + place, mask=known, other=0.0)
            tl.store(speed + place, step, mask=known)
        tl.store(weights + place, w - tl.load(lr) * step, mask=known)
