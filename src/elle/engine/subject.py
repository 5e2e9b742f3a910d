"""What is evaluated: the network of a run, of one of its checkpoints, or anyone's, with its test images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from elle.config import Config, given
from elle.data.registry import check_root, find_dataset, load_dataset
from elle.data.sources import ImageSet, Split, some_images
from elle.engine.trained import kept_network, load_network, load_run
from elle.engine.weights import put_weights, read_weights
from elle.errors import InputError
from elle.evaluation.units import FIRST, points_digest
from elle.files import file_digest
from elle.models.registry import Shape, build_model, check_model


@dataclass(frozen=True)
class Source:
    """Where a network comes from, in plain words that another process can read."""

    path: str | None = None
    """A run directory, or a file of weights in one: a checkpoint, or what was kept around a collapse."""
    model: str | None = None
    weights: str | None = None
    data: str | None = None
    root: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.weights is None):
            raise InputError("give either a run directory or checkpoint, or --model and --weights with --data")
        if self.weights is not None and (self.model is None or self.data is None):
            raise InputError(
                "--weights needs --model (a name, or module:function) and --data (a row of `elle datasets`)"
            )
        if self.path is not None and self.model is not None:
            raise InputError("--model goes with --weights; a run directory knows its own network")

    @property
    def place(self) -> Path:
        """Where an evaluation is written if no other place is named; a checkpoint's never replaces the run's."""
        if self.path is None:
            weights = Path(str(self.weights))
            return weights.with_name(f"{weights.stem}-evaluation")
        path = Path(self.path)
        return _run_of(path) / "evaluations" / path.stem if path.is_file() else path


@dataclass(frozen=True)
class Subject:
    """A network with what belongs to it; `weights` is the file it was read from."""

    model: nn.Module
    test: Split
    classes: tuple[str, ...]
    data: str
    model_name: str
    weights: Path
    eps: float
    norm: str
    numbers: npt.NDArray[np.int64]
    """The numbers of the images of `test` in the whole test set."""
    test_points: str
    """The digest of the whole test set."""
    config: Config | None = None

    @property
    def trained_batch(self) -> int:
        """How many images of this size a training step held; 1 where nothing is known."""
        if self.config is None:
            return 1
        return self.config.phases[-1].batch if self.config.phases else self.config.batch or 1

    def digest(self) -> str:
        """The SHA-256 of the weights' file."""
        return file_digest(self.weights)

    def points_digest(self) -> str:
        """The digest of the test images that are evaluated, and their labels."""
        return points_digest(self.test.x, self.test.y)


def load_subject(source: Source, device: torch.device, count: int | None = None) -> Subject:
    """The network on `device` in eval mode, with `count` test images or all; nothing is unpickled but tensors."""
    subject = _of_weights(source, count) if source.path is None else _of_run(source, Path(source.path), count)
    subject.model.to(device).eval()
    return subject


def _of_run(source: Source, path: Path, count: int | None) -> Subject:
    weights = path if path.is_file() else path / "model.safetensors"
    if path.is_file() and not (_run_of(path) / "config.toml").exists():
        raise InputError(f"{path} is not in a run directory; give one, or --weights {path} with --model and --data")
    trained = load_run(_run_of(path), weights=weights)
    config = trained.config.resolved()
    data = source.data or config.data
    own = data == config.data
    check_root(data, source.root)
    images = trained.images(source.root) if own else _shown(data, source.root or config.root, trained.header)
    test, numbers = some_images(images.test, count)
    if not own:
        _check_fit(data, test, images.classes, trained.header)
    return Subject(model=trained.model, test=test, classes=images.classes, data=data, model_name=config.model or "",
                   weights=weights, eps=given(config.eps), norm=config.norm, numbers=numbers,
                   test_points=_digest(images.test), config=config)  # fmt: skip


def _shown(data: str, root: str | None, network: Mapping[str, Any]) -> ImageSet:
    """The images of another set; image files are resized as those the network was trained on."""
    return load_dataset(data, root, image_size=network["shape"][-1] if find_dataset(data).files else None)


def _check_fit(data: str, test: Split, classes: tuple[str, ...], network: Mapping[str, Any]) -> None:
    """Refuse images that the run's network was not made for, before anything is written."""
    shape, trained_on = tuple(network["shape"]), tuple(network["classes"])
    if test.x.shape[1:] != shape or len(classes) != len(trained_on):
        raise InputError(
            f"--data {data} has images {_shape(test.x.shape[1:])} in {len(classes)} classes, and the "
            f"network was trained on {_shape(shape)} in {len(trained_on)}; leave --data out"
        )
    _check_order(data, classes, trained_on)


def _check_order(data: str, classes: tuple[str, ...], trained_on: tuple[str, ...]) -> None:
    # Other names may be other words for the same classes; the same names in another order never are.
    if classes != trained_on and set(classes) == set(trained_on):
        moved = next(k for k, name in enumerate(classes) if name != trained_on[k])
        raise InputError(
            f"--data {data} has the network's classes in another order: its class {moved} is {classes[moved]!r}, "
            f"and the network's is {trained_on[moved]!r}; give them the same order"
        )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _run_of(path: Path) -> Path:
    """The run directory of a checkpoint, of another file of weights in it, or itself."""
    if not path.is_file():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def _of_weights(source: Source, count: int | None) -> Subject:
    name, data, weights = str(source.model), str(source.data), Path(str(source.weights))
    row = find_dataset(data)
    check_root(data, source.root)
    tensors = read_weights(weights)
    if weights.suffix == ".safetensors" and kept_network(weights) == name:
        # The file knows what a name does not tell: the activation, a normalising first layer, the averaged weights.
        model, header = load_network(weights)
        images = _shown(data, source.root, header)
        test, numbers = some_images(images.test, count)
        check_model(model, name, _image_shape(test), len(images.classes))
        _check_order(data, images.classes, tuple(header["classes"]))
    else:
        images = load_dataset(data, source.root)
        test, numbers = some_images(images.test, count)
        model = build_model(name, _image_shape(test), len(images.classes))
        put_weights(model, tensors, weights, name)
    return Subject(model=model, test=test, classes=images.classes, data=data, model_name=name, weights=weights,
                   eps=row.defaults["eps"], norm="linf", numbers=numbers,
                   test_points=_digest(images.test))  # fmt: skip


def _digest(test: Split) -> str:
    """The digest of the whole test set; only the images that it reads are decoded."""
    return points_digest(test.part(np.arange(min(len(test), FIRST))).x, test.y)


def _image_shape(test: Split) -> Shape:
    channels, height, width = test.x.shape[1:]
    return channels, height, width
