"""Whether images are those of a run, or of its other ranks: by the names of the classes, their number, and files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elle.data.image_folder import FolderImages
from elle.data.sources import ImageSet
from elle.engine.ranks import Ranks
from elle.errors import InputError


def count_images(images: ImageSet) -> list[int]:
    """The numbers of training and test images; together with the classes they tell one set from another."""
    return [len(images.train), len(images.test)]


def drawn_files(images: ImageSet) -> str | None:
    """A digest of the names of test images that were drawn from the others; None where nobody drew them.

    One file less and another more, or a new name, make other images the test, and leave their number.
    """
    if not images.held_out or not isinstance(images.test, FolderImages):
        return None
    names = (f"{label}/{path.name}\0" for label, path in zip(images.test.y, images.test.files.paths, strict=True))
    return hashlib.sha256("".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def labels_digest(images: ImageSet) -> str:
    """A digest of the training labels in their order, which another split or order of as many images changes.

    Not of the test's: images in another order there, or others, have not been trained on.
    """
    return hashlib.sha256(images.train.y.tobytes()).hexdigest()


def check_same_images(path: Path, network: Mapping[str, Any], images: ImageSet) -> None:
    """Refuse to go on from a checkpoint on other images: labels, order and test split would not be those it knows."""
    _check_classes(path, network, images)
    if (before := network.get("images", count_images(images))) != count_images(images):
        raise InputError(
            f"{path} belongs to a run on {_counted(before)}, and there are {_counted(count_images(images))}; "
            f"give its very data, or choose another --out"
        )
    if _changed(network, "drawn", drawn_files(images)):
        raise InputError(
            f"{path} belongs to a run on other files: the test images, drawn from among all, would not be those it "
            f"left out; give its very data, or choose another --out"
        )
    if _changed(network, "labels", labels_digest(images)):
        raise InputError(
            f"{path} belongs to a run on other training images, or on these in another order: some that it left "
            f"out would be trained on; give its very data, or choose another --out"
        )


def check_test_images(path: Path, network: Mapping[str, Any], images: ImageSet, *, moved: bool) -> None:
    """Refuse test images of other classes, and those drawn anew from a folder that has changed since the training.

    `moved`: the user names the folder, which need not be the one of the training.
    """
    _check_classes(path, network, images)
    before = network.get("images", count_images(images))
    if not images.held_out or moved:
        return
    if sum(before) != sum(count_images(images)):
        raise InputError(
            f"the folder held {sum(before)} images when {path} was trained and holds {sum(count_images(images))} now: "
            f"its test images are others, most of them trained on; put it back, or name another with --root"
        )
    if _changed(network, "drawn", drawn_files(images)):
        raise InputError(
            f"the folder holds other files than when {path} was trained, or other names: its test images are others, "
            f"most of them trained on; put it back, or name another with --root"
        )


def check_alike(images: ImageSet, ranks: Ranks) -> None:
    """Refuse ranks whose folders differ: the one order that all draw would mean other images on each."""
    labels = hashlib.sha256(images.train.y.tobytes() + images.test.y.tobytes()).hexdigest()
    known = ranks.exchanged((count_images(images), images.classes, labels))
    for rank, one in enumerate(known):
        if one != known[0]:
            there, here = _counted(one[0]), _counted(known[0][0])
            what = f"{there}, and rank 0 {here}" if there != here else "other classes or labels than rank 0"
            raise InputError(f"rank {rank} has {what}; every rank needs the very same data")


def _check_classes(path: Path, network: Mapping[str, Any], images: ImageSet) -> None:
    before = tuple(network.get("classes", images.classes))
    if before == images.classes:
        return
    gone, new = set(before) - set(images.classes), set(images.classes) - set(before)
    words = [f"{min(names)!r} is {what}" for names, what in ((gone, "missing"), (new, "new")) if names]
    raise InputError(
        f"{path} was trained on other classes: {' and '.join(words) or 'their order is another'}; give its own data"
    )


def _changed(network: Mapping[str, Any], key: str, now: str | None) -> bool:
    """Whether a file says something else; those of former versions do not say it."""
    return bool(network.get(key, now) != now)


def _counted(counts: list[int]) -> str:
    return f"{counts[0]} training and {counts[1]} test images"
