"""The mean over an image's pixels and a linear layer behind it as GPU kernels; `head` launches them.

Activations [N, C, H, W] have the channels last: N images of `pixels` = H W rows of C values, in float16, as are weights
[K, C] and biases [K]. Sums are in float32, and so are the logits. A program has one image.
"""

import triton
import triton.language as tl


@triton.jit
def _taps(weight, output, channel, outputs, channels):
    """The weights of these outputs and channels."""
    known = (output < outputs)[:, None] & (channel < channels)[None, :]
    return tl.load(weight + output[:, None] * channels + channel[None, :], mask=known, other=0.0).to(tl.float32)


@triton.jit
def write_logits(
    x, weight, bias, logits, mean, pixels, channels, outputs,
    rows: tl.constexpr, block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The means, rounded as the weights' gradient reads them, and the logits; `columns` are the outputs, padded."""
    image = tl.program_id(0)
    output = tl.arange(0, columns)
    total = tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    for start in range(0, channels, block):
        channel = start + tl.arange(0, block)
        taps = _taps(weight, output, channel, outputs, channels)
        sums = tl.zeros([rows, block], tl.float32)
        for first in range(0, pixels, rows):
            row = first + tl.arange(0, rows)
            known = (row < pixels)[:, None] & (channel < channels)[None, :]
            place = (image * pixels + row)[:, None] * channels + channel[None, :]
            sums += tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        average = tl.sum(sums, 0) / pixels
        tl.store(mean + image * channels + channel, average.to(mean.dtype.element_ty), mask=channel < channels)
        total += tl.sum(taps * average[None, :], 1)
    tl.store(logits + image * outputs + output, total, mask=output < outputs)


@triton.jit
def write_input_gradient(
    g, weight, for_x, pixels, channels, outputs, rows: tl.constexpr, block: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
    """for_x, the same for each pixel of an image; a program has `block` of its channels."""
    blocks = tl.cdiv(channels, block)
    image = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    output = tl.arange(0, columns)
    taps = _taps(weight, output, channel, outputs, channels)
    of_g = tl.load(g + image * outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
    value = (tl.sum(taps * of_g[:, None], 0) / pixels).to(for_x.dtype.element_ty)
    for first in range(0, pixels, rows):
        row = first + tl.arange(0, rows)
        known = (row < pixels)[:, None] & (channel < channels)[None, :]
        place = (image * pixels + row)[:, None] * channels + channel[None, :]
        tl.store(for_x + place, tl.broadcast_to(value[None, :], [rows, block]), mask=known)
