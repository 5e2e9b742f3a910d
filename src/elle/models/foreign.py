"""Networks that are not elle's: those of timm and torchvision by name, and a user's own as `module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from elle.errors import InputError, first_line

_PACKAGES = ("timm", "torchvision")


def foreign_model(name: str, channels: int, classes: int) -> nn.Module:
    """`timm:NAME`, `torchvision:NAME`, or `module:function` called as function(num_classes=classes)."""
    module, function, arguments, settings = _call(name, channels, classes)
    if os.getcwd() not in sys.path:
        # A console script does not look in the current folder, where a user's module usually is.
        sys.path.insert(0, os.getcwd())
    try:
        model = getattr(importlib.import_module(module), function)(*arguments, **settings)
    except Exception as problem:  # code that is not ours may raise anything
        package = module.partition(".")[0]
        if package in _PACKAGES and isinstance(problem, ModuleNotFoundError) and problem.name == package:
            raise InputError(f"model={name} needs the package {package}: pip install {package}") from None
        words = [repr(argument) for argument in arguments] + [f"{key}={value}" for key, value in settings.items()]
        raise InputError(
            f"model={name} could not be built: {first_line(problem)} (it is called as {function}({', '.join(words)}))"
        ) from problem
    if not isinstance(model, nn.Module):
        raise InputError(f"model={name} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _call(name: str, channels: int, classes: int) -> tuple[str, str, tuple[str, ...], dict[str, Any]]:
    """Module, function, arguments and keywords that build the network `name`."""
    module, _, function = name.partition(":")
    settings: dict[str, Any] = {"num_classes": classes}
    if module == "timm":
        return "timm", "create_model", (function,), settings | {"in_chans": channels}
    if module == "torchvision":
        return "torchvision.models", "get_model", (function,), settings
    return module, function, (), settings
