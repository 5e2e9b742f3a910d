"""CIFAR-10 and CIFAR-100: official binary and Python files, unpacked or in their archives."""

from pathlib import Path
from typing import Any

import numpy as np

from elle.data.arrays import npz_layout
from elle.data.files import Files
from elle.data.parquet import parquet_layout
from elle.data.pickles import load_restricted
from elle.data.sources import ImageSet, Layout, Published, Split, checked_split, describe, join, load_published
from elle.errors import InputError

_PIXELS = 3 * 32 * 32
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10 = Published(
    "cifar10",
    "CIFAR-10",
    (3, 32, 32),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    _PAGE,
    ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "plain_text"),
)
CIFAR100 = Published(
    "cifar100",
    "CIFAR-100",
    (3, 32, 32),
    tuple(
        """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905 - a list would take a line each
    ),
    _PAGE,
    ("cifar-100-binary", "cifar-100-python", "cifar100"),
)


def cifar10(root: Path) -> ImageSet:
    """CIFAR-10 from binary files, Python files, npz files or parquet shards, in `root` or below."""
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    layouts = [
        _binary(
            CIFAR10, tuple(f"{name}.bin" for name in batches), "test_batch.bin", "batches.meta.txt", 1, "10-binary"
        ),
        _python(CIFAR10, batches, "test_batch", "batches.meta", ("labels", "label_names"), "10-python"),
        npz_layout(CIFAR10),
        parquet_layout(CIFAR10),
    ]
    return load_published(CIFAR10, layouts, root)


def cifar100(root: Path) -> ImageSet:
    """CIFAR-100 with its 100 fine labels, from the same four layouts."""
    layouts = [
        _binary(CIFAR100, ("train.bin",), "test.bin", "fine_label_names.txt", 2, "100-binary"),
        _python(CIFAR100, ("train",), "test", "meta", ("fine_labels", "fine_label_names"), "100-python"),
        npz_layout(CIFAR100),
        parquet_layout(CIFAR100),
    ]
    return load_published(CIFAR100, layouts, root)


def _archives(name: str) -> tuple[str, ...]:
    return f"cifar-{name}.tar.gz", f"cifar-{name}.tgz"


def _binary(about: Published, train: tuple[str, ...], test: str, meta: str, labels: int, archive: str) -> Layout:
    """Records of `labels` label bytes, the last of which counts, and 3 x 32 x 32 pixel bytes."""

    def batch(files: Files, file: str) -> Split:
        raw, name, record = files.read(file), files.label(file), labels + _PIXELS
        if len(raw) % record:
            raise InputError(f"{name}: {len(raw)} bytes is no multiple of the {record} of a record; {about.again}")
        records = np.frombuffer(raw, np.uint8).reshape(-1, record)
        x = records[:, labels:].reshape(-1, 3, 32, 32)
        return checked_split(name, x, records[:, labels - 1], len(about.classes), about.again)

    def load(files: Files) -> ImageSet:
        names = files.read(meta).decode("utf-8", errors="replace").split()
        classes = _checked_classes(files.label(meta), names, about)
        return ImageSet(join([batch(files, name) for name in train]), batch(files, test), classes)

    return Layout((*train, test, meta), load, _archives(archive))


def _python(
    about: Published, train: tuple[str, ...], test: str, meta: str, keys: tuple[str, str], archive: str
) -> Layout:
    """Pickled dictionaries with `data`, uint8 [N, 3072], and a list of N labels; read without running them."""
    label_key, names_key = keys

    def batch(files: Files, file: str) -> Split:
        name, content = files.label(file), _read_dict(files, file, about)
        x, labels = _field(name, content, "data", about), _field(name, content, label_key, about)
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PIXELS:
            raise InputError(f"{name}: `data` is {describe(x)}, not uint8 [N, {_PIXELS}]; {about.again}")
        if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 256 for label in labels):
            raise InputError(f"{name}: `{label_key}` is {describe(labels)}, not a list of integers; {about.again}")
        return checked_split(name, x.reshape(-1, 3, 32, 32), np.array(labels), len(about.classes), about.again)

    def load(files: Files) -> ImageSet:
        names = _field(files.label(meta), _read_dict(files, meta, about), names_key, about)
        classes = _checked_classes(files.label(meta), names, about)
        return ImageSet(join([batch(files, name) for name in train]), batch(files, test), classes)

    return Layout((*train, test, meta), load, _archives(archive))


def _read_dict(files: Files, file: str, about: Published) -> dict[Any, Any]:
    content = load_restricted(files.read(file), files.label(file))
    if not isinstance(content, dict):
        raise InputError(f"{files.label(file)}: holds {describe(content)}, not a dictionary; {about.again}")
    return content


def _field(name: str, content: dict[Any, Any], key: str, about: Published) -> Any:
    """The entry `key`, which is bytes when Python 2 wrote the file and str when Python 3 did."""
    for spelling in (key.encode(), key):
        if spelling in content:
            return content[spelling]
    raise InputError(f"{name}: has no entry `{key}`; {about.again}")


def _checked_classes(name: str, found: Any, about: Published) -> tuple[str, ...]:
    if isinstance(found, list) and len(found) == len(about.classes):
        names = [_text(one) for one in found]
        if all(names):
            return tuple(names)
    raise InputError(f"{name}: does not name {len(about.classes)} classes; {about.again}")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""
