"""One state, written atomically, read back safely: safetensors with the rest as JSON in its header."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from elle.errors import InputError
from elle.files import FolderLock, atomically, write_atomically

KEPT = 2
"""Checkpoints kept in a run directory: the newest, and the one before in case it cannot be read."""
_HEADER = "elle"
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    # Of a user's network alone.
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format calls the types of tensors."""
_LEFT_OVER = re.compile(r"\.(\d+)\.part(\.\w+)?$")
"""How the name ends under which `write_atomically` or, with the ending of its format, an export begins a file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Tensors and a JSON header in one safetensors file, atomically."""
    write_atomically(path, packed(tensors, header))


def packed(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """The bytes of such a safetensors file."""
    file = BytesIO()
    _write(file, _copied(tensors), json.dumps(header))
    return file.getvalue()


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in main memory; in their own layout, as another takes longer than the copy."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], header: str) -> None:
    """The safetensors format, one tensor after the other.

    The library's own `save` copies all of them while it holds Python's lock, and a training that goes on would wait.
    """
    # The widest first, so that each begins at a multiple of its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    about: dict[str, Any] = {"__metadata__": {_HEADER: header}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind, shape = _KINDS[tensors[name].dtype], list(tensors[name].shape)
        about[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; InputError names a file that is missing, truncated or not elle's."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    try:
        open(path, "rb").close()  # of a file that may not be opened, safetensors says that there is none
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = json.loads(metadata[_HEADER])
            if not isinstance(header, dict):
                raise ValueError(f"its {_HEADER!r} entry is not a JSON object")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except PermissionError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}") from None
    except (SafetensorError, OSError, ValueError) as problem:
        raise InputError(f"{path} is truncated or not a safetensors file ({problem})") from None
    except KeyError:
        raise InputError(f"{path} was not written by elle: its header has no {_HEADER!r} entry") from None
    return tensors, header


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.safetensors"


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*.safetensors"))


def take_checkpoint(
    run: Path, step: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> Callable[[], Path]:
    """Copy the state now; the function returned writes the checkpoint of `step`, and deletes older ones but one."""
    path, copies = checkpoint_path(run, step), _copied(tensors)
    text = json.dumps({"kind": "checkpoint", "step": step} | dict(header))

    def write() -> Path:
        with atomically(path) as file:
            _write(file, copies, text)
        # Those after it, of steps that a rollback undoes, are the rollback's to delete.
        for old in [other for other in checkpoints(run) if other.name < path.name][: 1 - KEPT]:
            old.unlink()
        return path

    return write


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's tensors and header; a bad one is refused by name and the one before it offered."""
    try:
        tensors, header = read_tensors(path)
        if header.get("kind") != "checkpoint":
            raise InputError(f"{path} is not a checkpoint")
    except InputError as problem:
        older = [other for other in checkpoints(path.parent.parent) if other.name < path.name and _readable(other)]
        offer = f"; the one before it can be used: --from {older[-1]}" if older else "; there is no older one to use"
        raise InputError(f"{problem}{offer}") from None
    return tensors, header


def _readable(path: Path) -> bool:
    try:
        read_tensors(path)
    except InputError:
        return False
    return True


class RunLock(FolderLock):
    """Holds a run directory; what a process that was killed while writing left in it is removed."""

    def __init__(self, run: Path) -> None:
        super().__init__(run, ".lock")
        for left_over in run.rglob(".*.part*"):
            ending = _LEFT_OVER.search(left_over.name)  # a folder may hold other programs' files too
            # An export does not hold the folder: it may be under way.
            if ending and not (ending[2] and _runs(int(ending[1]))):
                left_over.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True
