"""The update of weights whose gradients are still in float16, as a GPU kernel; `sgd` launches it."""

import triton
import triton.language as tl


@triton.jit
def update_weights(
    gradients, chunks, lr, grad_scale, found_inf, weight_decay, momentum, has_momentum: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """A program moves a chunk of one tensor.

    Of each chunk there is, in `chunks`: the number of its tensor among the gradients, its first element, how many
    elements come from there on, and where the weights and the momentum of that first one are.
    """
    if tl.load(found_inf) == 0.0:
        row = chunks + 5 * tl.program_id(0)
        number, first = tl.load(row), tl.load(row + 1)
        # Multiples of 8 all, so that a thread reads 16 bytes at a time.
        first, left = tl.multiple_of(first, 8), tl.multiple_of(tl.load(row + 2), 8)
        weights = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
        speed = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)), 16)
        gradient = gradients[0]
        for other in tl.static_range(1, len(gradients)):
            gradient = tl.where(number == other, gradients[other], gradient)
        place = tl.arange(0, block)
        known = place < left
        w = tl.load(weights + place, mask=known, other=0.0)
        g = tl.load(gradient + first + place, mask=known, other=0.0).to(tl.float32)
        step = g / tl.load(grad_scale) + weight_decay * w
        if has_momentum:
            step += momentum * tl.load(speed + place, mask=known, other=0.0)
            tl.store(speed + place, step, mask=known)
        tl.store(weights + place, w - tl.load(lr) * step, mask=known)
