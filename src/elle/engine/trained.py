"""A finished run read back: its network, its configuration, its test images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elle.config import Config, run_config
from elle.data.registry import check_root, data_folder, find_dataset, load_dataset
from elle.data.resident import to_tensors
from elle.data.sources import ImageSet, some_images
from elle.engine.checkpoint import read_tensors
from elle.engine.same_images import check_test_images
from elle.engine.weights import put_weights
from elle.errors import InputError
from elle.models.registry import build_model

_LARGEST = 2**14
"""Channels, or pixels to a side, of the images of a network: far beyond any that can be trained here."""


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    config: Config
    classes: tuple[str, ...]
    weights: Path
    header: Mapping[str, Any]
    """What the file of the weights says of the network."""

    def images(self, root: str | None = None) -> ImageSet:
        """The run's images, in `root` where they are elsewhere by now."""
        config = self.config
        check_root(config.data, root)
        images = load_dataset(config.data, root or config.root, image_size=config.image_size)
        if find_dataset(config.data).files:  # elsewhere a label is a number, whatever its name
            # Resolved: the run's own folder may be written otherwise, such as with the slash that a shell completes.
            moved = data_folder(root or config.root).resolve() != data_folder(config.root).resolve()
            check_test_images(self.weights, self.header, images, moved=moved)
        elif len(images.classes) != len(self.classes):
            raise InputError(
                f"{self.weights} was trained on {len(self.classes)} classes, and {config.data} has "
                f"{len(images.classes)}; give its own data"
            )
        shapes = self.header["shape"], images.test.part(np.arange(1)).x.shape[1:]
        if list(shapes[0]) != list(shapes[1]):
            sizes = [" x ".join(map(str, shape)) for shape in shapes]
            raise InputError(f"{self.weights} is for images of {sizes[0]}, and its run's are {sizes[1]}; give its own")
        return images

    def test_images(self, root: str | None = None, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Test images [N, C, H, W] in [0, 1], `limit` of them or all, and their labels [N], on the model's device."""
        test, _ = some_images(self.images(root).test, limit)
        return to_tensors(test, next(self.model.parameters()).device)


def load_run(directory: str | Path, device: torch.device | str = "cpu", weights: Path | None = None) -> Trained:
    """The network of a run directory, in eval mode; nothing is unpickled.

    `weights`: another file of the run than its final network, one of those kept around a collapse or a checkpoint.
    """
    directory = Path(directory)
    weights = weights or directory / "model.safetensors"
    config = run_config(directory)
    if not weights.exists():
        raise InputError(f"{directory} has no model.safetensors: the run has not finished; continue it with --resume")
    model, header = load_network(weights, checkpoint=weights != directory / "model.safetensors")
    return Trained(model.to(device), config, tuple(header["classes"]), weights, header)


def load_network(weights: Path, checkpoint: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """The network in a file that `elle train` or `elle export` wrote, in eval mode, and the file's header.

    `checkpoint`: a checkpoint's network will do.
    """
    tensors, header = network_tensors(weights) if checkpoint else read_tensors(weights)
    _check_header(weights, header)
    channels, height, width = header["shape"]
    model = build_model(
        header["model"],
        (channels, height, width),
        len(header["classes"]),
        activation=header.get("activation", "relu"),  # runs of former versions do not name it
        # The values come with the weights.
        normalise=([0.0] * channels, [1.0] * channels) if header.get("normalise", "none") == "dataset" else None,
    )
    put_weights(model, tensors, weights, header["model"])
    return model.eval(), header


def network_tensors(weights: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights in a file of elle's, and the header about their network, of a checkpoint, too.

    Of a checkpoint those that its run would have ended with there: the mean of its weights, where it keeps one.
    """
    tensors, header = read_tensors(weights)
    if "network" in header:
        kept = "average." if any(name.startswith("average.") for name in tensors) else "model."
        tensors = {name.removeprefix(kept): tensors[name] for name in tensors if name.startswith(kept)}
        header = header["network"]
    return tensors, header


def _check_header(weights: Path, header: Any) -> None:
    """InputError where the file does not say what network it holds: which, for what images, of what classes."""
    if not isinstance(header, dict) or header.get("kind") != "model":
        raise InputError(f"{weights} is not a model that `elle train` wrote")
    shape, classes = header.get("shape"), header.get("classes")
    is_whole = {
        "model": isinstance(header.get("model"), str),
        "activation": isinstance(header.get("activation", ""), str),
        "shape": isinstance(shape, list)
        and len(shape) == 3
        and all(type(size) is int and 0 < size <= _LARGEST for size in shape),
        "classes": isinstance(classes, list) and len(classes) > 0 and all(isinstance(name, str) for name in classes),
    }
    if damaged := [key for key, whole in is_whole.items() if not whole]:
        raise InputError(f"{weights} is damaged: its header has no {damaged[0]} that can be used; get the file again")


def kept_network(weights: Path) -> str | None:
    """The name of the network in a file of elle's; None for a file of anyone else's."""
    try:
        _, header = read_tensors(weights)
    except InputError:
        return None
    network = header.get("network", header)
    name: str | None = network.get("model") if isinstance(network, dict) else None
    return name


def load(directory: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """The network of a run directory, or of a .safetensors file: images in [0, 1] in, logits out, eval mode."""
    if Path(directory).is_file():
        return load_network(Path(directory))[0].to(device)
    return load_run(directory, device).model
