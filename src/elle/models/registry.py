"""MODELS: networks by name, with their sizes; others come from `foreign`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elle.core.attacks.network import in_eval_mode
from elle.errors import InputError, first_line, nearest
from elle.models.foreign import foreign_model
from elle.models.layout import give_channels_first, takes_channels_last
from elle.models.normalise import Statistics, normalised
from elle.models.residual import Activation, PreActResNet, ResNet, WideResNet
from elle.models.small_cnn import SmallCNN

Shape = tuple[int, int, int]
"""Channels, height, width."""
ACTIVATIONS: dict[str, Activation] = {"relu": nn.ReLU, "silu": nn.SiLU, "softplus": nn.Softplus, "gelu": nn.GELU}


@dataclass(frozen=True)
class Model:
    """One network; its size is declared for images of `shape` in `classes` classes, and counted by a test."""

    name: str
    description: str
    build: Callable[[Shape, int, Activation], nn.Module]
    """(shape of an image, classes, activation) -> network"""
    parameters: int
    gflop: float
    """10^9 operations of one forward of one image; a multiply-add is two."""
    shape: Shape = (3, 32, 32)
    classes: int = 10


_IMAGENET: dict[str, Any] = {"shape": (3, 224, 224), "classes": 1000}
_18, _34 = (2, 2, 2, 2), (3, 4, 6, 3)
_50: dict[str, Any] = {"blocks": _34, "bottleneck": True}
_ROWS = [
    Model("preact-resnet18", "PreActResNet18, the paper's", partial(PreActResNet, blocks=_18), 11_172_170, 1.111),
    Model("preact-resnet34", "PreActResNet34", partial(PreActResNet, blocks=_34), 21_280_330, 2.319),
    Model("preact-resnet50", "PreActResNet50", partial(PreActResNet, **_50), 23_513_162, 2.596),
    Model("resnet18", "ResNet18", partial(ResNet, blocks=_18), 11_689_512, 3.628, **_IMAGENET),
    Model("resnet34", "ResNet34", partial(ResNet, blocks=_34), 21_797_672, 7.328, **_IMAGENET),
    Model("resnet50", "ResNet50, the paper's on ImageNet", partial(ResNet, **_50), 25_557_032, 8.178, **_IMAGENET),
    Model("wide-resnet-28-10", "WideResNet, the paper's", partial(WideResNet, depth=28, factor=10), 36_479_194, 10.487),
    Model("wide-resnet-34-10", "WideResNet", partial(WideResNet, depth=34, factor=10), 46_160_474, 13.318),
    Model("small-cnn", "three convolutions and two linear layers, for CPUs", SmallCNN, 221_094, 0.003),
]
MODELS: dict[str, Model] = {row.name: row for row in _ROWS}


def build_model(
    name: str, shape: Shape, classes: int, *, activation: str = "relu", normalise: Statistics | None = None
) -> nn.Module:
    """The network `name` for images of `shape` (channels, height, width), checked on a blank image.

    `normalise`: the mean and standard deviation of a normalising first layer.
    """
    if ":" not in name:
        model = _registered(name, shape, classes, activation)
    elif activation == "relu":
        model = foreign_model(name, shape[0], classes)
    else:
        raise InputError(f"activation={activation} is for the rows of `elle models`; {name} has its own: leave it out")
    if normalise is not None:
        model = normalised(model, normalise)
    check_model(model, name, shape, classes)
    if ":" in name and not takes_channels_last(model, torch.zeros(2, *shape)):
        give_channels_first(model)
    return model


def check_name(name: str) -> None:
    """InputError where no network has that name; one of another package, or of the user's, is not looked for."""
    if ":" not in name and name not in MODELS:
        raise InputError(
            f"model {name!r} does not exist{nearest(name, MODELS)}; choose from {', '.join(MODELS)}, "
            f"or give timm:NAME, torchvision:NAME, or your own as module:function"
        )


def _registered(name: str, shape: Shape, classes: int, activation: str) -> nn.Module:
    check_name(name)
    if activation not in ACTIVATIONS:
        raise InputError(f"activation {activation!r} does not exist; choose from {', '.join(ACTIVATIONS)}")
    return MODELS[name].build(shape, classes, ACTIVATIONS[activation])


def check_model(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """InputError where the network does not give logits of `classes` for images of `shape`."""
    try:
        with torch.enable_grad(), in_eval_mode(model):
            # As every attack asks it: a network that writes into such images could not be attacked.
            logits = model(torch.zeros(2, *shape, requires_grad=True))
    except Exception as problem:  # the user's code may raise anything
        raise InputError(f"model={name} does not take images of shape {shape}: {first_line(problem)}") from problem
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"model={name} gives {found} for 2 images; the data has {classes} classes, so expected (2, {classes})"
        )
