"""The weights that a training starts from, where they are not random: `init`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from elle.config import Config, given
from elle.engine.trained import kept_network, network_tensors
from elle.engine.weights import put_weights, read_weights
from elle.errors import InputError, expanded
from elle.models.normalise import NAMES, PREFIX


def start_from_weights(model: nn.Module, config: Config, classes: int) -> str:
    """Give the network the weights that `init` names; what is to be said of that.

    A last layer that they lack, or have for other classes, stays random.
    """
    path = _file(given(config.init))
    tensors, network = _read(path)
    told = f"init={path}"
    own = model.state_dict()
    theirs = {"activation": "relu"} | network if network else {}  # runs of former versions do not name it
    if not network and set(NAMES) <= tensors.keys():
        theirs = {"normalise": "dataset"}
    for key in ("normalise", "activation"):
        if key in theirs and theirs[key] != getattr(config, key):
            raise InputError(f"{told} is a network with {key}={theirs[key]}; give {key}={theirs[key]}")
    if config.normalise == "dataset" and "normalise" not in theirs:
        tensors = {PREFIX + name: value for name, value in tensors.items()} | {name: own[name] for name in NAMES}
    anew = _last_layers(model, classes, tensors)
    put_weights(model, tensors | {name: own[name] for name in anew}, told, given(config.model))
    return f"starting from {path}" + (f", with a new {' and '.join(anew)} for {classes} classes" if anew else "")


def _file(init: str) -> Path:
    """The file of weights: of a run, those it ended with."""
    path = expanded(init)
    if not path.is_dir():
        return path
    if not (path / "model.safetensors").exists():
        raise InputError(f"init={path} has no model.safetensors, as a finished run has; give a file in it")
    return path / "model.safetensors"


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights in a file, and what one of elle's says of its network."""
    if path.suffix == ".safetensors" and kept_network(path) is not None:
        return network_tensors(path)
    return read_weights(path, "init="), {}


def _last_layers(model: nn.Module, classes: int, tensors: dict[str, Tensor]) -> list[str]:
    """The parameters of linear layers with an output for each class that the tensors lack, or have for other classes.

    Where they have them for other inputs, the layer is not one of these: loading them tells what does not fit.
    """
    anew: list[str] = []
    for prefix, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == classes:
            own = {f"{prefix}.{name}".lstrip("."): value for name, value in layer.named_parameters()}
            known = {name: tensors[name] for name in own if name in tensors}
            same = known.keys() == own.keys() and all(known[name].shape == own[name].shape for name in own)
            if not same and all(value.shape[1:] == own[name].shape[1:] for name, value in known.items()):
                anew += own
    return anew
