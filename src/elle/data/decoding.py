"""An image file as a square of pixels: a random part of it to train on, its middle to evaluate on."""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, JpegImagePlugin

from elle.data.folder import MAX_PIXELS, decode
from elle.errors import InputError

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of the file."""

AREA = (0.08, 1.0)
"""The share of an image that a random crop covers, as ImageNet is usually trained on (arXiv 1409.4842)."""
_LOG_RATIO = math.log(4 / 3)
DRAWS = 40
"""Random numbers that a crop may need: ten tries of four."""
MARGIN = 8 / 7
"""Short side over crop side when evaluating: 256 pixels for a crop of 224."""


def random_box(numbers: npt.NDArray[np.float64], width: int, height: int) -> Box:
    """A random part of the image: its share uniform in AREA, width over height log-uniform in [3/4, 4/3].

    Made of `numbers` uniform in [0, 1), DRAWS of them.
    """
    for share, ratio, across, down in numbers.reshape(-1, 4).tolist():
        area = width * height * (AREA[0] + share * (AREA[1] - AREA[0]))
        shape = math.exp(_LOG_RATIO * (2 * ratio - 1))
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        if w <= width and h <= height:
            left, top = across * (width - w), down * (height - h)
            return left, top, left + w, top + h
    # Too long or too high an image for any part drawn: the longest or highest one allowed, from its middle.
    w, h = min(width, height * math.exp(_LOG_RATIO)), min(height, width * math.exp(_LOG_RATIO))
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def centre_box(size: int, width: int, height: int) -> Box:
    """The middle square that is size x size once the short side is between `size` and MARGIN * size."""
    short = min(width, height)
    side = size * short / min(max(short, size), round(MARGIN * size))
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class OpenImage:
    """An image whose size is known and whose pixels are decoded when a box of them is asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.image = self._plain() or self._decoded()
        size: tuple[int, int] = self.image.size
        self.width, self.height = size

    def _plain(self) -> Any:
        """The file as a colour JPEG not yet decoded, or None for anything else."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                raw = file.read()
            # Not Image.open, which looks for a second picture in the file.
            image = JpegImagePlugin.JpegImageFile(io.BytesIO(raw))
            image.decodermaxblock = len(raw)  # decoded in one go, not in blocks
        except Exception:
            return None
        # Without a tile there is a header and no picture.
        return image if image.mode == "RGB" and image.tile and image.width * image.height <= MAX_PIXELS else None

    def _decoded(self) -> Any:
        """The file of any format; what is wrong with it, if anything, is an InputError that names it."""
        try:
            return Image.fromarray(decode(Path(self.path), self.path))
        except InputError as problem:  # who has one such file often has more, and would meet them one at a time
            raise InputError(f"{problem}; `elle data check` lists all such files") from None

    def draft(self, box: Box, width: int, height: int) -> None:
        """Have a JPEG halved, quartered.. while decoding, where that leaves a pixel for each of width x height."""
        spare = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
        if spare >= 2:
            self.image.draft("RGB", (int(self.width / spare), int(self.height / spare)))

    def resized(self, box: Box, into: Pixels, whole: bool = True) -> None:
        """Write the pixels of `box`, resized, to `into` uint8 [H, W, 3]."""
        resize(self.pixels(box, into.shape[1], into.shape[0], whole), into)

    def pixels(self, box: Box, width: int, height: int, whole: bool) -> Pixels:
        """The pixels of `box`, read-only uint8 [h, w, 3], enough of them for width x height.

        `whole` decodes all of the file, and so finds any damage in it; otherwise the part below the box is left out.
        """
        if self.image.format == "JPEG":
            self.draft(box, width, height)
            if not whole:
                pixels = self._upper_rows(box)
                # Where the file is damaged, the last row is still the black one it began with.
                if pixels[-1].any():
                    return pixels
                # Opened again, as Pillow reads a file once; smaller again, so that it is what `whole` gives.
                self.image = self._plain() or self._decoded()
                self.draft(box, width, height)
            try:
                self.image.load()
            except Exception:
                self.image = self._decoded()
        return self._cropped(box)

    def _upper_rows(self, box: Box) -> Pixels:
        """The pixels of `box`, decoding no row below it: those would take their share of the time for nothing."""
        image = self.image
        codec, (left, top, right, _), offset, arguments = image.tile[0]
        image.tile = [(codec, (left, top, right, self._part(box)[3]), offset, arguments)]
        with contextlib.suppress(OSError):  # the decoder complains that there are rows left
            image.load()
        image.tile = []
        return self._cropped(box)

    def _part(self, box: Box) -> tuple[int, int, int, int]:
        return pixel_box(box, (self.width, self.height), self.image.size)

    def _cropped(self, box: Box) -> Pixels:
        part = self._part(box)
        width, height = part[2] - part[0], part[3] - part[1]
        # What crop() and tobytes() do, in one pass: they, and NumPy after them, copy the box four times.
        packer = Image._getencoder("RGB", "raw", ("RGB", 0, 1))
        packer.setimage(self.image.im, part)
        return np.frombuffer(packer.encode(3 * width * height)[2], np.uint8).reshape(height, width, 3)


def pixel_box(box: Box, size: tuple[int, int], shown: tuple[int, int]) -> tuple[int, int, int, int]:
    """The whole pixels of `box`, given for an image of `size`, in a copy of it that has the size `shown`."""
    across, down = shown[0] / size[0], shown[1] / size[1]
    left, top = min(round(box[0] * across), shown[0] - 1), min(round(box[1] * down), shown[1] - 1)
    return left, top, max(left + 1, round(box[2] * across)), max(top + 1, round(box[3] * down))


def resize(pixels: Pixels, into: Pixels) -> None:
    """Write `pixels` [h, w, 3] to `into` [H, W, 3], by bilinear interpolation with antialiasing."""
    if pixels.shape == into.shape:
        into[...] = pixels
        return
    # This is what interpolate() does, but it would copy the result once more; Pillow takes twice as long.
    resample = torch.ops.aten._upsample_bilinear2d_aa.out
    resample(_channels_first(pixels), into.shape[:2], False, None, None, out=_channels_first(into))


def _channels_first(pixels: Pixels) -> torch.Tensor:
    """A view [1, 3, h, w] whose strides torch knows as channels last, its fastest; NumPy's view has others."""
    return torch.from_numpy(pixels).view(1, *pixels.shape).permute(0, 3, 1, 2)
