"""A run directory as one piece of bytes, to travel between machines."""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
from pathlib import Path

from elle.experiments.training import RESULT
from elle.files import write_atomically

_PARTS = "final.parts"
"""What is done of a final evaluation, while it is under way."""


def newest_checkpoint(path: Path) -> str:
    """The name of a run's newest checkpoint, empty where there is none."""
    return max((file.name for file in (path / "checkpoints").glob("step-*.safetensors")), default="")


def pack(path: Path) -> bytes:
    """A run's files, of its checkpoints the newest; it may be training meanwhile."""
    stream = io.BytesIO()
    checkpoint = newest_checkpoint(path)
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for file in sorted(path.rglob("*")):
            old = file.parent.name == "checkpoints" and file.name != checkpoint
            if old or file.name.startswith(".") or not file.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):  # replaced by a newer checkpoint while we look
                content = file.read_bytes()
                entry = tarfile.TarInfo(str(file.relative_to(path)))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def unpack(content: bytes, path: Path) -> None:
    """Write the files of a `pack`, the result last; delete older checkpoints, and parts that it does not hold."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        entries = sorted(archive.getmembers(), key=lambda entry: entry.name == RESULT)
        for entry in entries:
            target = (path / entry.name).resolve()
            file = archive.extractfile(entry)
            if file is None or not target.is_relative_to(path.resolve()):
                raise ValueError(f"{entry.name!r} does not belong into a run directory")
            write_atomically(target, file.read())
    if not any(entry.name.startswith(f"{_PARTS}/") for entry in entries):
        shutil.rmtree(path / _PARTS, ignore_errors=True)
    newest = newest_checkpoint(path)
    for old in (path / "checkpoints").glob("step-*.safetensors"):
        if old.name != newest:
            old.unlink()
