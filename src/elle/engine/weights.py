"""Files of weights of anyone's: read without running what may be in them, and put into a network."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from elle.errors import InputError, first_line


def read_weights(file: Path, option: str = "--weights ") -> dict[str, Tensor]:
    """The state_dict in a .safetensors file, or in a torch file that holds tensors and plain containers alone.

    `option`: what a user wrote before its name.
    """
    told = f"{option}{file}"
    if not file.is_file():
        raise InputError(f"{told} {'is a folder, not a file' if file.is_dir() else 'does not exist'}")
    found: Any
    try:
        if file.suffix == ".safetensors":
            found = load_file(file)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pickle that is refused, or read, all the same
                found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own words advise to run what is in the file
        raise InputError(
            f"{told} holds more than tensors, or is no torch file; save it with torch.save(model.state_dict(), FILE)"
        ) from None
    except Exception as problem:  # a file of anything else may raise anything, down to a KeyError
        raise InputError(
            f"{told} is neither safetensors nor a plain state_dict ({first_line(problem)}); "
            f"save it with torch.save(model.state_dict(), FILE)"
        ) from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            _check_alone(told, found, key)
            found = found[key]
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{told} holds no state_dict; save it with torch.save(model.state_dict(), FILE)")
    tensors: dict[str, Tensor] = found
    # What DistributedDataParallel and torch.compile put before each name, in either order.
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _check_alone(told: str, found: dict[Any, Any], key: str) -> None:
    """Refuse a file with several weights of one network, such as the last and the averaged: either may be meant."""

    def names(value: Any) -> set[Any]:
        return {str(name).removeprefix("module.") for name in value} if isinstance(value, dict) else set()

    mine = names(found[key])
    others = []
    for other, value in found.items():
        below = value.values() if isinstance(value, dict) else ()
        if other != key and any(len(mine & names(one)) > len(mine) / 2 for one in (value, *below)):
            others.append(str(other))
    if others:
        raise InputError(
            f"{told} holds the weights of the same network several times ({', '.join([key, *others])}); "
            f"save those you mean with torch.save(STATE_DICT, FILE)"
        )


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], file: Path | str, name: str) -> None:
    """Load a file's weights; InputError, in one line, where they do not fit the network."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[-1].strip()
        reason = reason if len(reason) < 200 else reason[:200] + " ..."
        raise InputError(f"{file} does not fit the network {name}: {reason}") from None
