"""DATASETS: an image set = a loader and the settings it brings, one frozen row each."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elle.data.arrays import own_arrays
from elle.data.bundled import digits, mnist5k
from elle.data.cifar import cifar10, cifar100
from elle.data.idx import fashion_mnist, mnist
from elle.data.image_folder import enough_images, folder_set, imagenet
from elle.data.mat import svhn
from elle.data.sources import ImageSet, Split
from elle.data.statistics import Statistics, channel_statistics
from elle.errors import InputError, expanded, nearest

ROOT_VARIABLE = "ELLE_DATA"
DEFAULT_ROOT = Path("data")


@dataclass(frozen=True)
class Dataset:
    """One image set; `defaults` are config keys, `weights` the default lambda (or lambda_max) by penalty.

    A weight is a number, or a function of eps and the schedule's name.
    """

    name: str
    description: str
    load: Callable[..., ImageSet]
    """Takes the folder where `needs_root`."""
    defaults: Mapping[str, Any]
    weights: Mapping[str, float | Callable[[float, str], float]]
    needs_root: bool = True
    files: bool = False
    """A folder of image files: `load` also takes image_size and workers."""
    statistics: Statistics | None = None
    """Published mean and standard deviation; otherwise they are computed from the training images."""

    def weight(self, penalty: str, eps: float, schedule: str) -> float:
        """The default lambda, or lambda_max, of a penalty."""
        value = self.weights[penalty]
        return value(eps, schedule) if callable(value) else value


def _is_long(schedule: str) -> bool:
    return schedule.startswith(("long", "cos"))


def _cifar10_elle(eps: float, schedule: str) -> float:
    """The paper's choices (Appendix B.2): it grows with eps, and is largest for the Long schedule."""
    if _is_long(schedule) or eps > 20.5 / 255:
        return 10_000.0
    return 1_000.0 if eps < 8.5 / 255 else 5_000.0


_CIFAR = {
    "model": "preact-resnet18",
    "eps": 8 / 255,
    "epochs": 30,
    "batch": 128,
    "lr": 0.2,
    "schedule": "short",
    "validation": 1024,
    "clip": False,
    "crop": 4,
    "flip": True,
}
# No paper's settings: a start for small grey images.
_GREY = {
    "model": "small-cnn",
    "eps": 0.3,
    "epochs": 10,
    "batch": 128,
    "lr": 0.15,
    "schedule": "short",
    "validation": 1024,
    "clip": True,
    "crop": 0,
    "flip": False,
}
_ROWS = (
    Dataset(
        "digits",
        "1,797 handwritten digits, 8 x 8 grey pixels, part of scikit-learn: nothing to download",
        digits,
        needs_root=False,
        defaults=_GREY | {"eps": 0.2, "epochs": 30, "batch": 64, "lr": 0.1, "validation": 0},
        weights={"elle": 100.0, "elle-a": 100.0},
    ),
    Dataset(
        "mnist5k",
        "5,000 handwritten digits of MNIST, 28 x 28 grey pixels, part of elle: nothing to download",
        mnist5k,
        needs_root=False,
        defaults=_GREY | {"eps": 0.28, "epochs": 20, "batch": 64, "validation": 0},
        weights={"elle": 100.0, "elle-a": 300.0},
    ),
    Dataset(
        "cifar10",
        "60,000 photographs in 10 classes, 32 x 32 colour pixels",
        cifar10,
        defaults=_CIFAR,
        weights={"elle": _cifar10_elle, "elle-a": lambda eps, schedule: 10_000.0 if _is_long(schedule) else 4_000.0},
    ),
    Dataset(
        "cifar100",
        "60,000 photographs in 100 classes, 32 x 32 colour pixels",
        cifar100,
        defaults=_CIFAR,
        weights={"elle": 5_000.0, "elle-a": 4_000.0},
    ),
    Dataset(
        "svhn",
        "99,289 digits of house numbers, 32 x 32 colour pixels",
        svhn,
        # As published: neither crops nor mirror images, which are no digits.
        defaults=_CIFAR | {"epochs": 15, "lr": 0.05, "schedule": "short-svhn", "crop": 0, "flip": False},
        weights={"elle": 20_000.0, "elle-a": 20_000.0},
    ),
    Dataset(
        "mnist",
        "70,000 handwritten digits, 28 x 28 grey pixels",
        mnist,
        defaults=_GREY,
        weights={"elle": 100.0, "elle-a": 300.0},
    ),
    Dataset(
        "fashion-mnist",
        "70,000 articles of clothing, 28 x 28 grey pixels",
        fashion_mnist,
        defaults=_GREY | {"eps": 0.1},
        weights={"elle": 1_000.0, "elle-a": 1_000.0},
    ),
    Dataset(
        "arrays",
        "your own images as .npz or .npy files: x uint8 [N, H, W, C], y integers [N]",
        own_arrays,
        defaults=_CIFAR | {"validation": 0, "crop": 0, "flip": False},
        weights={"elle": 4_000.0, "elle-a": 4_000.0},
    ),
    Dataset(
        "folder",
        "your own images: CLASS/*.jpg in root, or train/CLASS/*.jpg and val/CLASS/*.jpg (or .png, .webp)",
        folder_set,
        # What is None depends on how many the images are, and how large: `filled_in`.
        defaults={"eps": 4 / 255, "schedule": "short", "clip": True, "flip": True}
        | dict.fromkeys(("model", "epochs", "batch", "lr", "validation", "crop")),
        weights={"elle": 4_000.0, "elle-a": 4_000.0},
        files=True,
    ),
    Dataset(
        "imagenet",
        "1,281,167 photographs in 1,000 classes: train/CLASS/*.JPEG and val/CLASS/*.JPEG in root",
        imagenet,
        defaults={
            "model": "resnet50",
            "eps": 4 / 255,
            "epochs": 15,
            "batch": 256,
            "lr": 0.2,
            "schedule": "imagenet-15",
            "validation": 1024,
            "clip": True,
            "crop": 4,
            "flip": True,
        },
        weights={"elle": 10_000.0, "elle-a": 10_000.0},
        files=True,
        statistics=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
)
DATASETS: dict[str, Dataset] = {row.name: row for row in _ROWS}


def find_dataset(name: str) -> Dataset:
    """The row called `name`."""
    if name in DATASETS:
        return DATASETS[name]
    raise InputError(f"no dataset {name!r}{nearest(name, DATASETS)}; there are {', '.join(DATASETS)}")


def check_root(name: str, root: str | Path | None) -> None:
    """Refuse a folder that a user names for a set that has none: images other than those meant would be read."""
    if root and not find_dataset(name).needs_root:
        raise InputError(f"root={root}: {name} comes with the installation; did you mean data=folder as well?")


def data_folder(root: str | Path | None = None) -> Path:
    """`root`, else the folder in ELLE_DATA, else ./data."""
    return expanded(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT)


def dataset_statistics(name: str, train: Split) -> Statistics:
    """Mean and standard deviation of each channel of the set called `name`."""
    return find_dataset(name).statistics or channel_statistics(enough_images(train))


def load_dataset(
    name: str, root: str | Path | None = None, *, image_size: int | None = None, workers: int | None = None
) -> ImageSet:
    """The set called `name`, read from `root`, else from the folder in ELLE_DATA, else from ./data."""
    row = find_dataset(name)
    options = {"image_size": image_size, "workers": workers} if row.files else {}
    if image_size is not None and not row.files:
        raise InputError(f"image_size={image_size}: the images of {name} have a size of their own; leave it out")
    if not row.needs_root:
        return row.load()
    # The first place given is the only one read: falling back past a mistyped folder would hide the mistake.
    with naming_the_folder(root):
        return row.load(data_folder(root), **options)


@contextlib.contextmanager
def naming_the_folder(root: str | Path | None) -> Iterator[None]:
    """Add to an error where its folder comes from, if it is not there and the error alone does not tell."""
    try:
        yield
    except InputError as error:
        folder = data_folder(root)
        if folder.is_dir() or (root and (folder.is_absolute() or folder.exists())):
            raise
        ways = "root=FOLDER or --root FOLDER"
        if root:  # perhaps that of a run, which was trained from elsewhere
            origin = f"looked for in {Path.cwd()}"
        elif os.environ.get(ROOT_VARIABLE):
            origin = f"set by {ROOT_VARIABLE}"
        else:
            origin = f"the default, as {ROOT_VARIABLE} is not set"
            ways = f"{ROOT_VARIABLE}=FOLDER, {ways}"  # the first is the only one that `elle sweep` takes
        raise InputError(f"{error} (the folder {folder} is {origin}; {ways} names another)") from None
