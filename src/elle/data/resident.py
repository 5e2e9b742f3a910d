"""A whole image set on the device, so that a training step waits for no loader."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from elle.data.phases import Timetable
from elle.data.sources import Split
from elle.errors import InputError


class TrainingImages(Protocol):
    """Where a training step has its batches from."""

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of this epoch, int64 [N]: a function of (seed, epoch) alone, the same on every device."""

    def stage(self, epoch: int, step: int) -> None:
        """Have the batch of that step ready."""

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, H, W] in [0, 1], cropped and flipped at random, and labels of index [B]."""

    def close(self) -> None:
        """Let go of what makes batches ready."""


def split_validation(data: Split, count: int, seed: int) -> tuple[Split, Split]:
    """Training and validation images: `count` of them, drawn with `seed`, are taken out for validation."""
    kept, held_out = chosen_for_validation(len(data), count, seed)
    return Split(data.x[kept], data.y[kept]), Split(data.x[held_out], data.y[held_out])


def chosen_for_validation(images: int, count: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which images are kept for training, and which are taken out."""
    if not 0 <= count < images:
        raise InputError(f"validation={count}: there are {images} images; use 0 to {images - 1}")
    order = np.random.default_rng(seed).permutation(images)
    return np.sort(order[count:]), order[:count]


def to_tensors(data: Split, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """All images as float32 in [0, 1] and labels as int64, for evaluation."""
    return to_unit(torch.tensor(data.x, device=device)), torch.tensor(data.y, device=device)


def to_unit(x: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return x / 255  # float32: of integers, one kernel converts and divides


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of `count` images in an epoch: a function of (seed, epoch) alone."""
    # A spawn key keeps pairs apart for any seed; seed + epoch would give seed 1 the epochs of seed 0.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,))).permutation(count)


def _check_crop(crop: int, height: int, width: int) -> None:
    if crop > min(height, width):
        raise InputError(f"crop={crop} is more padding than images of {height} x {width} pixels have; use less")


class Resident:
    """A whole training set on the device as uint8; batches are cropped, flipped and converted there."""

    def __init__(self, data: Split, device: torch.device | str, crop: int = 0, flip: bool = False) -> None:
        height, width = data.x.shape[2:]
        _check_crop(crop, height, width)
        self.crop = crop
        self.flip = flip
        # A batch comes in the layout of the set; convolutions on a GPU are fastest with the channels last.
        layout = torch.channels_last if torch.device(device).type == "cuda" else torch.contiguous_format
        padded = pad(torch.tensor(data.x, device=device), (crop, crop, crop, crop))
        self.x = padded.contiguous(memory_format=layout)
        self.y = torch.tensor(data.y, device=device)
        # Every crop of every image, [N, top, left, C, H, W]: a view, from which one gather takes a batch.
        self._crops = self.x.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)

    def __len__(self) -> int:
        return len(self.y)

    def order(self, seed: int, epoch: int) -> Tensor:
        return torch.from_numpy(epoch_order(len(self), seed, epoch)).to(self.y.device)

    def stage(self, epoch: int, step: int) -> None:
        """Nothing: every image is on the device already."""

    def close(self) -> None:
        """Nothing: there are no workers to end."""

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        count = len(index)
        flipped = torch.randint(2, (count, 1, 1, 1), device=index.device, dtype=torch.bool) if self.flip else None
        if self.crop:
            top, left = (torch.randint(2 * self.crop + 1, (count,), device=index.device) for _ in range(2))
            x = self._crops[index, top, left]
        else:
            x = self.x[index]
        if flipped is not None:
            x = torch.where(flipped, x.flip(-1), x)
        return to_unit(x), self.y[index]


class ResidentInPhases:
    """The same with a copy of the set for each image size of a timetable; batches are of the phase that `stage` names.

    `crop` pads images of their own size, and smaller ones in proportion.
    """

    def __init__(
        self, data: Split, device: torch.device | str, timetable: Timetable, crop: int = 0, flip: bool = False
    ) -> None:
        height, width = data.x.shape[2:]
        if height != width:
            raise InputError(f"phases are of square images, and these are {height} x {width} pixels; leave phases out")
        _check_crop(crop, height, width)
        self.timetable = timetable
        self.of_size = {
            size: Resident(resized(data, size, device), device, round(crop * size / width), flip)
            for size in {phase.image_size for phase in timetable.phases}
        }
        self.stage(0, 0)

    def __len__(self) -> int:
        return len(self.now)

    def order(self, seed: int, epoch: int) -> Tensor:
        return self.now.order(seed, epoch)

    def stage(self, epoch: int, step: int) -> None:
        self.now = self.of_size[self.timetable.size(epoch)]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.now.batch(index)

    def close(self) -> None:
        """Nothing: there are no workers to end."""


def resized(data: Split, size: int, device: torch.device | str) -> Split:
    """The images with `size` pixels a side; the very same where that is their own."""
    if data.x.shape[2:] == (size, size):
        return data
    parts = [
        interpolate(torch.tensor(part, device=device).float(), (size, size), mode="bilinear", antialias=True)
        for part in np.array_split(data.x, -(-len(data) // 4096))  # in parts: floats take four times the room
    ]
    return Split(torch.cat([part.round().clamp(0, 255).byte() for part in parts]).cpu().numpy(), data.y)
