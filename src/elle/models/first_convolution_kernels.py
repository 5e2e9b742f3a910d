"""A network's first convolution as GPU kernels, 3x3 at stride 1 and padding 1; `first_convolution` launches them.

Images x [N, C, H, W] of few channels are read by their strides, in float32 or float16; activations [N, K, H, W] have
the channels last, in float16. `pixels` = N H W counts the places of all images in order, row by row. Products are of
float16 and added up in float32.

The gradient of the weights is the product of the same values with g, over the pixels: of a part of them by each
program of a first kernel, and added up, always in the same order, by a second.

Forward, a program has `block` pixels and all outputs: it gathers the 9 C values around each, which the first cache
holds, and multiplies them by the weights at once. Back, a program has whole rows of images. With a tap's row i and
column j, the gradient of x is

    for_x[h, w, c] = sum_j s[h, w + 1 - j, j, c]     s[h, w, j, c] = sum_{i, k} g[h + 1 - i, w, k] weight[k, c, i, j]

so that g is loaded three times instead of nine, the second and third time from a cache; the small s is then moved by a
pixel between threads. Beyond the ends of a row there is nothing, and a program needs no other's s.
"""

import triton
import triton.language as tl


@triton.jit
def _weights(weight, row, column, channel, output, known, strides):
    """The weights of these taps, channels and outputs, which are of shapes that broadcast."""
    of_output, of_channel, of_row, of_column = strides
    place = output * of_output + channel * of_channel + row * of_row + column * of_column
    return tl.load(weight + place, mask=known, other=0.0)


@triton.jit
def _taps(depth: tl.constexpr, channels: tl.constexpr):
    """Of the values around a pixel: channel, row and column, the padding in rows beyond the third.

    Channels innermost: with the channels last, the weights of an output then lie in a row.
    """
    value = tl.arange(0, depth)
    return value % channels, value // (3 * channels), (value // channels) % 3


@triton.jit
def _around(x, pixel, pixels, channel, i, j, strides, height: tl.constexpr, width: tl.constexpr):
    """These values around each pixel, in float16."""
    of_image, of_channel, of_row, of_column = strides
    w, h, n = pixel % width, (pixel // width) % height, pixel // (width * height)
    around = n * of_image + h * of_row + w * of_column
    place = around[:, None] + ((i - 1) * of_row + (j - 1) * of_column + channel * of_channel)[None, :]
    tap_h, tap_w = h[:, None] + (i - 1)[None, :], w[:, None] + (j - 1)[None, :]
    inside = (tap_h >= 0) & (tap_h < height) & (tap_w >= 0) & (tap_w < width)
    inside = inside & (i < 3)[None, :] & (pixel < pixels)[:, None]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float16)


@triton.jit(do_not_specialize=["pixels"])
def write_convolved(
    x, weight, y, pixels, x_strides, weight_strides, channels: tl.constexpr, outputs: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """y; `columns` and `depth` are the outputs and the values around a pixel, padded to what a product takes."""
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    channel, i, j = _taps(depth, channels)
    output = tl.arange(0, columns)
    known = (i < 3)[:, None] & (output < outputs)[None, :]
    taps = _weights(weight, i[:, None], j[:, None], channel[:, None], output[None, :], known, weight_strides)
    values = _around(x, pixel, pixels, channel, i, j, x_strides, height, width)
    result = tl.dot(values, taps).to(y.dtype.element_ty)
    there = (pixel < pixels)[:, None] & (output < outputs)[None, :]
    tl.store(y + pixel[:, None] * outputs + output[None, :], result, mask=there)


@triton.jit(do_not_specialize=["pixels"])
def add_weight_gradient(
    g, x, partial, pixels, x_strides, channels: tl.constexpr, outputs: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Of this program's pixels the gradients of all weights: partial[programs, depth, columns]."""
    channel, i, j = _taps(depth, channels)
    output = tl.arange(0, columns)
    total = tl.zeros([depth, columns], tl.float32)
    for start in range(tl.program_id(0) * block, pixels, tl.num_programs(0) * block):
        pixel = start + tl.arange(0, block)
        there = (pixel < pixels)[:, None] & (output < outputs)[None, :]
        of_g = tl.load(g + pixel[:, None] * outputs + output[None, :], mask=there, other=0.0)
        values = _around(x, pixel, pixels, channel, i, j, x_strides, height, width)
        total = tl.dot(tl.trans(values), of_g, total)
    place = (tl.program_id(0) * depth + tl.arange(0, depth))[:, None] * columns + output[None, :]
    tl.store(partial + place, total)


@triton.jit(do_not_specialize=["parts"])
def write_weight_gradient(
    partial, for_weight, parts, weight_strides, channels: tl.constexpr, outputs: tl.constexpr,
    most: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, `most` at most; a program has one of the values around a pixel, and all outputs."""
    of_output, of_channel, of_row, of_column = weight_strides
    value = tl.program_id(0)
    channel, i, j = value % channels, value // (3 * channels), (value // channels) % 3
    part, output = tl.arange(0, most), tl.arange(0, columns)
    place = (part[:, None] * depth + value) * columns + output[None, :]
    total = tl.sum(tl.load(partial + place, mask=(part < parts)[:, None], other=0.0), 0)
    target = for_weight + output * of_output + (channel * of_channel + i * of_row + j * of_column)
    tl.store(target, total.to(for_weight.dtype.element_ty), mask=output < outputs)


@triton.jit(do_not_specialize=["pixels"])
def write_input_gradient(
    g, weight, for_x, pixels, x_strides, weight_strides, channels: tl.constexpr, outputs: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, at_most: tl.constexpr,
):  # fmt: skip
    """for_x; `columns` and `at_most` are the outputs and channels, padded, and `block` is `width` at least."""
    of_image, of_channel, of_row, of_column = x_strides
    local = tl.arange(0, block)
    whole: tl.constexpr = block // width * width
    pixel = tl.program_id(0) * whole + local
    there = (local < whole) & (pixel < pixels)
    w, h, n = pixel % width, (pixel // width) % height, pixel // (width * height)
    output = tl.arange(0, columns)
    # Of s: three columns of taps with so many channels each, and one of padding.
    value = tl.arange(0, 4 * at_most)
    channel, j = value % at_most, value // at_most
    known = (output < outputs)[:, None] & ((j < 3) & (channel < channels))[None, :]
    taps = ()
    for i in tl.static_range(3):  # first, so that no load of g has to wait behind them
        taps += (_weights(weight, i, j[None, :], channel[None, :], output[:, None], known, weight_strides),)  # type: ignore[assignment]
    s = tl.zeros([block, 4 * at_most], tl.float32)
    for i in tl.static_range(3):
        inside = there & (h + (1 - i) >= 0) & (h + (1 - i) < height)
        place = (pixel + (1 - i) * width)[:, None] * outputs + output[None, :]
        of_g = tl.load(g + place, mask=inside[:, None] & (output < outputs)[None, :], other=0.0)
        s = tl.dot(of_g, taps[i], s)
    from_w = w[:, None] + (1 - j)[None, :]
    inside = (local < whole)[:, None] & (from_w >= 0) & (from_w < width) & (j < 3)[None, :]
    moved = tl.gather(s, tl.where(inside, local[:, None] + (1 - j)[None, :], 0), 0)
    moved = tl.where(inside, moved, 0.0)
    result = tl.sum(tl.reshape(moved, [block, 4, at_most]), 1)
    channel = tl.arange(0, at_most)
    place = (n * of_image + h * of_row + w * of_column)[:, None] + channel[None, :] * of_channel
    tl.store(
        for_x + place, result.to(for_x.dtype.element_ty), mask=there[:, None] & (channel < channels)[None, :]
    )  # fmt: skip
