"""The mean and standard deviation of an image set's channels, for networks that normalise."""

import numpy as np
import numpy.typing as npt

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of pixels in [0, 1]."""
_CHUNK = 1024


def channel_statistics(x: npt.NDArray[np.uint8]) -> Statistics:
    """Exact statistics of images uint8 [N, C, H, W], from a histogram of each channel's 256 levels."""
    counts = np.zeros((x.shape[1], 256))
    # In chunks, because bincount makes integers of eight bytes from every pixel.
    for start in range(0, len(x), _CHUNK):
        for channel, count in enumerate(counts):
            count += np.bincount(x[start : start + _CHUNK, channel].ravel(), minlength=256)
    shares = counts / counts.sum(1, keepdims=True)
    levels = np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
    # A channel of one value says nothing, and must not become infinite.
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
