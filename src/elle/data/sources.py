"""Files to arrays: each source gives uint8 images [N, C, H, W] and int64 labels [N], checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elle.data.pickles import load_restricted
from elle.errors import InputError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PIXELS = 3 * 32 * 32
_TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_FETCH = "get the file again from https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class Split:
    """Images x uint8 [N, C, H, W] and their labels y int64 [N]."""

    x: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ImageSet:
    """A training and a test split, with the names of the classes."""

    train: Split
    test: Split
    classes: tuple[str, ...]


def digits(root: Path | None) -> ImageSet:
    """scikit-learn's handwritten digits, 8 x 8 pixels: 1,297 training and 500 test images, no files."""
    from sklearn.datasets import load_digits  # here, because it takes a second and only this set needs it

    raw = load_digits()
    x = np.rint(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    y = raw.target.astype(np.int64)
    # RandomState, because NumPy promises that its stream never changes: the split is the same everywhere.
    order = np.random.RandomState(0).permutation(len(y))
    train, test = order[:-500], order[-500:]
    return ImageSet(Split(x[train], y[train]), Split(x[test], y[test]), tuple("0123456789"))


def mnist5k(root: Path | None) -> ImageSet:
    """5,000 of MNIST's training images, 28 x 28 pixels, inside the package: 4,000 to train, 1,000 to test."""
    with np.load(Path(__file__).with_name("mnist5k.npz"), allow_pickle=False) as raw:
        x, y = raw["x"][:, None], raw["y"].astype(np.int64)
    order = np.random.RandomState(0).permutation(len(y))
    train, test = order[:4000], order[4000:]
    return ImageSet(Split(x[train], y[train]), Split(x[test], y[test]), tuple("0123456789"))


def cifar10(root: Path) -> ImageSet:
    """CIFAR-10 from its binary files, its Python files or train.npz and test.npz, in `root` or below."""
    folders = [root, *(root / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10"))]
    partial: list[str] = []
    for layout in _LAYOUTS:
        for folder in folders:
            missing = [name for name in layout.files if not (folder / name).is_file()]
            if not missing:
                return layout.load(folder)
            if len(missing) < len(layout.files):
                partial.append(f"{folder} lacks {', '.join(missing)}")
    if partial:
        raise InputError(f"CIFAR-10 is incomplete: {'; '.join(partial)}; {_FETCH}")
    places = ", ".join(str(folder) if folder.is_dir() else f"{folder} (no such folder)" for folder in folders)
    raise InputError(f"no CIFAR-10 found; looked in {places}; unpack cifar-10-binary.tar.gz in the first")


def _load_binary(folder: Path) -> ImageSet:
    train = _join([_binary_batch(folder / f"{name}.bin") for name in _TRAIN_BATCHES])
    meta = folder / "batches.meta.txt"
    names = _read(meta).decode("utf-8", errors="replace").split()
    return ImageSet(train, _binary_batch(folder / "test_batch.bin"), _checked_classes(meta, names))


def _load_python(folder: Path) -> ImageSet:
    train = _join([_python_batch(folder / name) for name in _TRAIN_BATCHES])
    meta = folder / "batches.meta"
    names = _field(meta, _read_dict(meta), "label_names")
    return ImageSet(train, _python_batch(folder / "test_batch"), _checked_classes(meta, names))


def _load_npz(folder: Path) -> ImageSet:
    return ImageSet(_npz_split(folder / "train.npz"), _npz_split(folder / "test.npz"), CIFAR10_CLASSES)


@dataclass(frozen=True)
class _Layout:
    files: tuple[str, ...]
    load: Callable[[Path], ImageSet]


_LAYOUTS = (
    _Layout((*(f"{name}.bin" for name in (*_TRAIN_BATCHES, "test_batch")), "batches.meta.txt"), _load_binary),
    _Layout((*_TRAIN_BATCHES, "test_batch", "batches.meta"), _load_python),
    _Layout(("train.npz", "test.npz"), _load_npz),
)


def _binary_batch(path: Path) -> Split:
    """Records of one label byte and 3 x 32 x 32 pixel bytes."""
    raw = _read(path)
    record = 1 + _PIXELS
    if len(raw) % record:
        raise InputError(f"{path}: {len(raw)} bytes is no multiple of the {record} of a record; {_FETCH}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return _checked_split(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])


def _python_batch(path: Path) -> Split:
    """A pickled dictionary with `data`, uint8 [N, 3072], and `labels`, a list of N integers."""
    batch = _read_dict(path)
    x, labels = _field(path, batch, "data"), _field(path, batch, "labels")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PIXELS:
        raise InputError(f"{path}: `data` is {_describe(x)}, not uint8 [N, {_PIXELS}]; {_FETCH}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise InputError(f"{path}: `labels` is {_describe(labels)}, not a list of integers; {_FETCH}")
    return _checked_split(path, x.reshape(-1, 3, 32, 32), np.array(labels))


def _npz_split(path: Path) -> Split:
    """Arrays `x`, uint8 [N, 32, 32, 3], and `y`, integers [N]."""
    hint = "write it with numpy.savez(file, x=images, y=labels)"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except Exception as error:  # a damaged archive can fail in any way at all
        raise InputError(f"{path}: no arrays `x` and `y` in it ({type(error).__name__}); {hint}") from None
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (32, 32, 3):
        raise InputError(f"{path}: `x` is {_describe(x)}, not uint8 [N, 32, 32, 3]; {hint}")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise InputError(f"{path}: `y` is {_describe(y)}, not uint8 [N]; {hint}")
    return _checked_split(path, x.transpose(0, 3, 1, 2), y)


def _checked_split(path: Path, x: npt.NDArray[np.uint8], y: npt.NDArray[Any]) -> Split:
    if len(x) != len(y):
        raise InputError(f"{path}: {len(x)} images but {len(y)} labels; {_FETCH}")
    if len(y) == 0:
        raise InputError(f"{path}: holds no images; {_FETCH}")
    wrong = y[(y < 0) | (y >= len(CIFAR10_CLASSES))]
    if len(wrong):
        raise InputError(f"{path}: label {wrong[0]} is outside 0..{len(CIFAR10_CLASSES) - 1}; {_FETCH}")
    # Copied: a view of the file's bytes is read-only, and torch warns about such arrays.
    return Split(np.array(x, order="C"), y.astype(np.int64))


def _checked_classes(path: Path, names: Any) -> tuple[str, ...]:
    named = isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)
    if named and len(names) == len(CIFAR10_CLASSES):
        return tuple(name if isinstance(name, str) else name.decode("utf-8", "replace") for name in names)
    raise InputError(f"{path}: does not name {len(CIFAR10_CLASSES)} classes; {_FETCH}")


def _join(batches: Sequence[Split]) -> Split:
    x = np.concatenate([batch.x for batch in batches])
    return Split(x, np.concatenate([batch.y for batch in batches]))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None


def _read_dict(path: Path) -> dict[Any, Any]:
    content = load_restricted(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds {_describe(content)}, not a dictionary; {_FETCH}")
    return content


def _field(path: Path, content: dict[Any, Any], name: str) -> Any:
    """The entry `name`, whose key is bytes when Python 2 wrote the file and str when Python 3 did."""
    for key in (name.encode(), name):
        if key in content:
            return content[key]
    raise InputError(f"{path}: has no entry `{name}`; {_FETCH}")


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"
