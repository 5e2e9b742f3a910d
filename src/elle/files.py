"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from elle.errors import WorkError


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, flush to the disk, rename: a reader sees the old file or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the rename itself survive a power cut
        finally:
            os.close(folder)
    except BaseException as problem:  # an interrupt leaves no half file either
        temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise not_written(path, problem) from None
        raise


def not_written(path: Path, problem: OSError) -> WorkError:
    """The one line for a file that could not be written."""
    return WorkError(
        f"could not write {path}: {problem.strerror or problem}; what was there before is untouched; "
        f"repair that and run it again (a training continues with --resume)"
    )
