"""The sets that come with the installation: nothing to download."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from elle.data.sources import ImageSet, Split


def digits() -> ImageSet:
    """scikit-learn's handwritten digits, 8 x 8 pixels: 1,297 training and 500 test images, no files."""
    from sklearn.datasets import load_digits  # here, because it takes a second and only this set needs it

    raw = load_digits()
    x = np.rint(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    return _split(x, raw.target.astype(np.int64), tested=500)


def mnist5k() -> ImageSet:
    """5,000 of MNIST's training images, 28 x 28 pixels, inside the package: 4,000 to train, 1,000 to test."""
    with np.load(Path(__file__).with_name("mnist5k.npz"), allow_pickle=False) as raw:
        x, y = raw["x"][:, None], raw["y"].astype(np.int64)
    return _split(x, y, tested=1000)


def _split(x: npt.NDArray[np.uint8], y: npt.NDArray[np.int64], tested: int) -> ImageSet:
    # RandomState, because NumPy promises that its stream never changes: the split is the same everywhere.
    order = np.random.RandomState(0).permutation(len(y))
    train, test = order[:-tested], order[-tested:]
    return ImageSet(Split(x[train], y[train]), Split(x[test], y[test]), tuple("0123456789"))
