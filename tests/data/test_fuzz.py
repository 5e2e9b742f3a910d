"""Damaged files of every format: an InputError or images, in bounded time and memory, and nothing is ever run.

Mutations strike the file as it is and, where it is compressed, its contents before they are compressed again:
otherwise a checksum would stop almost all of them. `pytest -m slow tests/data/test_fuzz.py` runs 10,000 a format.
"""

import gzip
import io
import resource
import signal
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from elle.data.arrays import own_arrays
from elle.data.cifar import cifar10
from elle.data.files import unpack
from elle.data.folder import decode
from elle.data.idx import mnist
from elle.data.mat import svhn
from elle.errors import InputError

from .layouts import (
    encoded,
    small_images,
    write_archive,
    write_binary,
    write_idx,
    write_mat,
    write_parquet,
    write_python,
)

SECONDS = 10
"""One file; a hang is cut off here, and far beyond what any takes."""
MEBIBYTES = 256
"""By which the whole run may raise the process's peak."""
FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "ctypes.dlopen"}
Read = Callable[[bytes], object]
_watching = False
_events: list[str] = []


@sys.addaudithook
def _watch(event: str, arguments: object) -> None:
    if _watching and event in FORBIDDEN:
        _events.append(event)


def mutate(raw: bytes, draw: np.random.Generator) -> bytes:
    """Bytes changed, cut off, doubled, taken out, or overwritten by extreme numbers."""
    data = bytearray(raw)
    for _ in range(draw.integers(1, 5)):
        if not data:
            break
        # Half of the damage strikes the first bytes, where the headers are.
        place = int(draw.integers(min(len(data), 256) if draw.random() < 0.5 else len(data)))
        length = int(draw.integers(1, 65))
        match draw.integers(6):
            case 0:
                data[place] ^= 1 << int(draw.integers(8))
            case 1:
                data[place] = int(draw.integers(256))
            case 2:
                extremes = (b"\xff" * 4, b"\x00" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80")
                some = extremes[draw.integers(len(extremes))]
                data[place : place + len(some)] = some
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = data[place : place + length]
            case _:
                if draw.random() < 0.3:
                    del data[place:]
    return bytes(data)


def _replaced(path: Path, load: Callable[[], object]) -> Read:
    original = path.read_bytes()

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        try:
            return load()
        finally:
            path.write_bytes(original)

    return read


def _zip_with(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def formats(root: Path) -> dict[str, list[tuple[bytes, Read]]]:
    """For each format its files to mutate, each with its reader."""
    x, y = small_images(6, (8, 8, 3))
    arrays = root / "arrays"
    arrays.mkdir()
    for split in ("train", "test"):
        np.savez_compressed(arrays / f"{split}.npz", x=x, y=y)
    npz = _replaced(arrays / "train.npz", lambda: own_arrays(arrays))
    plain = root / "plain"
    plain.mkdir()
    for split in ("train", "test"):
        np.save(plain / f"x_{split}.npy", x)
        np.save(plain / f"y_{split}.npy", y)
    binary, python = write_binary(root / "b"), write_python(root / "p")
    packed = write_archive(root / "t" / "cifar-10-binary.tar.gz", binary)
    mats, thin = write_mat(root / "m"), write_mat(root / "n", compressed=False)
    idx, plain_idx = write_idx(root / "i"), write_idx(root / "j", zipped=False)
    shards = write_parquet(root / "h")
    picture = small_images(1, (24, 20, 3))[0][0]
    smooth = np.linspace(0, 255, 24 * 20 * 3).reshape(24, 20, 3).astype(np.uint8)
    tar = gzip.decompress(packed.read_bytes())
    read_tar = _replaced(packed, lambda: (cifar10(root / "t"), unpack(packed, root / "out")))
    read_mat = _replaced(mats / "train_32x32.mat", lambda: svhn(root / "m"))
    mat = (mats / "train_32x32.mat").read_bytes()
    members = {"x.npy": _npy(x), "y.npy": _npy(y)}

    def rezipped(name: str) -> Read:
        return lambda raw: npz(_zip_with(members | {name: raw}))

    end = 136 + int.from_bytes(mat[132:136], "little")  # of the first element, `X`

    def repacked_mat(raw: bytes) -> object:
        content = zlib.compress(raw, 1)
        return read_mat(mat[:132] + len(content).to_bytes(4, "little") + content + mat[end:])

    def file(path: Path, load: Callable[[], object]) -> tuple[bytes, Read]:
        return path.read_bytes(), _replaced(path, load)

    def image(raw: bytes) -> tuple[bytes, Read]:
        return raw, lambda damaged: decode(damaged, "image")

    images = idx / "train-images-idx3-ubyte.gz"
    read_idx = _replaced(images, lambda: mnist(root / "i"))
    return {
        "bin": [file(binary / "data_batch_1.bin", lambda: cifar10(root / "b"))],
        "pickle": [
            file(python / "test_batch", lambda: cifar10(root / "p")),
            file(python / "batches.meta", lambda: cifar10(root / "p")),
        ],
        "npz": [
            ((arrays / "train.npz").read_bytes(), npz),
            (members["x.npy"], rezipped("x.npy")),
            (members["y.npy"], rezipped("y.npy")),
        ],
        "npy": [file(plain / f"{part}_train.npy", lambda: own_arrays(plain)) for part in "xy"],
        "mat": [
            (mat, read_mat),
            (zlib.decompress(mat[136:end]), repacked_mat),
            file(thin / "train_32x32.mat", lambda: svhn(root / "n")),
        ],
        "idx": [
            file(plain_idx / "train-images-idx3-ubyte", lambda: mnist(root / "j")),
            file(images, lambda: mnist(root / "i")),
            (gzip.decompress(images.read_bytes()), lambda raw: read_idx(gzip.compress(raw, 1))),
        ],
        "parquet": [file(shards / "train-00001-of-00002.parquet", lambda: cifar10(root / "h"))],
        "tar.gz": [
            (packed.read_bytes(), read_tar),
            (tar, lambda raw: read_tar(gzip.compress(raw, 1))),
        ],
        "png": [image(encoded(picture, "PNG")), image(encoded(smooth[..., 0], "PNG", bits=8))],
        "jpeg": [image(encoded(smooth, "JPEG")), image(encoded(smooth, "JPEG", progressive=True))],
        "webp": [image(encoded(smooth, "WEBP")), image(encoded(smooth, "WEBP", lossless=True))],
    }


FORMATS = ("bin", "pickle", "npz", "npy", "mat", "idx", "parquet", "tar.gz", "png", "jpeg", "webp")


class _TooSlow(BaseException):
    """No `except Exception` of a reader may swallow it."""


def _cut_off(*_: object) -> None:
    raise _TooSlow


def fuzz(root: Path, kind: str, count: int) -> dict[str, float]:
    """How many of `count` damaged files were refused, the slowest in seconds, the rise of the peak in MiB."""
    from PIL import Image

    global _watching
    Image.init()  # else its plugins are imported, which is running code, at the first file that is no image
    seeds = formats(root)[kind]
    for raw, read in seeds:
        read(raw)
    signal.signal(signal.SIGALRM, _cut_off)
    messages: set[str] = set()
    refused, slowest = 0, 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        raw, read = seeds[number % len(seeds)]
        damaged = mutate(raw, np.random.default_rng([FORMATS.index(kind), number]))
        started = time.monotonic()
        _watching = True
        signal.alarm(SECONDS)
        try:
            read(damaged)
        except InputError as problem:
            refused += 1
            messages.add(str(problem))
        finally:
            signal.alarm(0)
            _watching = False
        with suppress(InputError):
            read(raw) if number % 500 == 0 else None  # the reader keeps no state of a damaged file
        slowest = max(slowest, time.monotonic() - started)
    assert not _events
    assert not [message for message in messages if "\n" in message or len(message) > 1000]
    rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return {"refused": refused, "slowest": slowest, "mebibytes": rise}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_refused_or_read(tmp_path, kind, count, record_property):
    outcome = fuzz(tmp_path, kind, count)
    record_property("outcome", outcome)
    print(kind, count, outcome)
    assert outcome["refused"] > count / 20
    assert outcome["mebibytes"] < MEBIBYTES
