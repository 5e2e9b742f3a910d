"""MODELS: networks by name, and a user's own as `module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from elle.errors import InputError, nearest
from elle.models.preact_resnet import PreActResNet
from elle.models.small_cnn import SmallCNN

Shape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True)
class Model:
    name: str
    description: str
    build: Callable[[Shape, int], nn.Module]
    """(shape of an image, classes) -> network"""


_ROWS = [
    Model(
        "preact-resnet18", "PreActResNet18 for small images", lambda shape, k: PreActResNet((2, 2, 2, 2), shape[0], k)
    ),
    Model("small-cnn", "three convolutions and two linear layers, for CPUs", SmallCNN),
]
MODELS: dict[str, Model] = {row.name: row for row in _ROWS}


def build_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """The network `name` for images of `shape` (channels, height, width), checked on a blank image."""
    model = _imported(name, classes) if ":" in name else _registered(name, shape, classes)
    _check(model, name, shape, classes)
    return model


def _registered(name: str, shape: Shape, classes: int) -> nn.Module:
    if name not in MODELS:
        raise InputError(
            f"model {name!r} does not exist{nearest(name, MODELS)}; "
            f"choose from {', '.join(MODELS)}, or give your own as module:function"
        )
    return MODELS[name].build(shape, classes)


def _imported(name: str, classes: int) -> nn.Module:
    """`module:function` called as function(num_classes=classes), as torchvision's builders are."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        # A console script does not look in the current folder, where a user's module usually is.
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        model = function(num_classes=classes)
    except Exception as problem:  # the user's code may raise anything
        raise InputError(
            f"model={name} could not be built: {_first_line(problem)} "
            f"(it is called as {function_name}(num_classes={classes}))"
        ) from problem
    if not isinstance(model, nn.Module):
        raise InputError(f"model={name} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _check(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(2, *shape))
    except Exception as problem:  # the user's code may raise anything
        raise InputError(f"model={name} does not take images of shape {shape}: {_first_line(problem)}") from problem
    for module, training in modes.items():
        module.training = training
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"model={name} gives {found} for 2 images; the data has {classes} classes, so expected (2, {classes})"
        )


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
