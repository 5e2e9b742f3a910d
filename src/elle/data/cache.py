"""Decoded, resized images kept on the disk, so that a JPEG is decoded in the first epoch only."""

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elle.data.folder import REPAIR
from elle.errors import InputError

# crc32 of the pixels, width and height of the file; all zero where there is none yet.
_ENTRY = np.dtype([("checksum", "<u4"), ("width", "<u4"), ("height", "<u4")])
_FREE_SHARE = 0.05
"""Of the disk: nothing is added to the cache when less than this would be left."""

Cached = tuple[npt.NDArray[np.uint8], int, int]
"""Pixels [side, side, 3], and the width and height of the file they came from."""


class ResizeCache:
    """Squares of side x side pixels, one for each file, filled as the files are first read.

    An image is squeezed into the square whatever its shape: a box of the file is the same box, scaled, of the square.
    Any number of processes may share a cache: what they write is the same, and an entry, written after its pixels,
    holds their checksum, so that nothing half written is ever used.
    """

    def __init__(self, folder: Path, files: Sequence[Path], side: int) -> None:
        self.side = side
        self.stem = folder / f"{_key(files)}-{side}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._pixels = os.open(self.stem.with_suffix(".pixels"), os.O_RDWR | os.O_CREAT, 0o644)
            self._entries = os.open(self.stem.with_suffix(".entries"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as problem:
            raise InputError(f"cache={folder}: {problem.strerror}; name a folder that can be written") from None

    def get(self, number: int) -> Cached | None:
        """The square of file `number`, or None if it is not there whole."""
        raw = os.pread(self._entries, _ENTRY.itemsize, number * _ENTRY.itemsize)
        if len(raw) < _ENTRY.itemsize:
            return None
        checksum, width, height = np.frombuffer(raw, _ENTRY)[0].item()
        count = 3 * self.side**2
        pixels = os.pread(self._pixels, count, number * count) if width else b""
        if len(pixels) < count or zlib.crc32(pixels) != checksum:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(self.side, self.side, 3), width, height

    def put(self, number: int, pixels: npt.NDArray[np.uint8], width: int, height: int) -> None:
        """Keep the square of file `number`, unless the disk is almost full."""
        disk = os.fstatvfs(self._pixels)
        if disk.f_bavail * disk.f_frsize - pixels.nbytes < _FREE_SHARE * disk.f_blocks * disk.f_frsize:
            return
        raw = pixels.tobytes()
        entry = np.array([(zlib.crc32(raw), width, height)], _ENTRY).tobytes()
        try:
            # pwrite, not a memory map: a disk that fills up is an error here and a killed process there.
            if os.pwrite(self._pixels, raw, number * len(raw)) == len(raw):
                os.pwrite(self._entries, entry, number * len(entry))
        except OSError:
            return  # the cache is a convenience: without it the file is decoded again


def _key(files: Sequence[Path]) -> str:
    """A digest of the files in their order: another name, size or time of change makes another cache."""
    digest = hashlib.sha256()
    for path in files:
        try:
            status = path.stat()
        except OSError as problem:
            raise InputError(f"{path}: cannot be read ({problem.strerror}); {REPAIR}") from None
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
