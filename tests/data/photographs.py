"""Small folders of image files, with content that tells where in an image a pixel was."""

from pathlib import Path

import numpy as np
from PIL import Image

from elle.data.folder import FolderSplit


def photograph(draw: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth enough to survive JPEG, different everywhere, nowhere black."""
    coarse = Image.fromarray(draw.integers(40, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BILINEAR)


def write_photographs(folder: Path, count: int, seed: int = 0, classes: int = 3) -> FolderSplit:
    """JPEG files of many shapes around 60 x 45; the label of file k is k % classes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    paths = []
    for number in range(count):
        width, height = int(draw.integers(40, 80)), int(draw.integers(30, 60))
        paths.append(folder / f"{number:03d}.jpg")
        photograph(draw, width, height).save(paths[-1], quality=92)
    return FolderSplit(paths, np.arange(count) % classes)


def write_folder(root: Path, train: int = 12, test: int | None = 4) -> Path:
    """train/CLASS/*.jpg and val/CLASS/*.jpg of the classes cat and dog, that many of each."""
    for split, count in (("train", train), ("val", test)):
        for seed, name in enumerate(("cat", "dog")):
            if count is not None:
                write_photographs(root / split / name, count, seed)
    return root
