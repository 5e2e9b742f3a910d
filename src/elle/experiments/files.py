"""Files of a folder that several processes may look at: written whole or not at all, and held by one at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO

from elle.errors import InputError
from elle.files import write_atomically


def write_text(path: Path, text: str) -> None:
    """A text file, in one step."""
    write_atomically(path, text.encode("utf-8", "replace"))


def write_json(path: Path, value: Any) -> None:
    """A JSON file, in one step."""
    write_text(path, json.dumps(value, indent=2) + "\n")


class FolderLock:
    """Holds a folder for one process; the system lets go when the process ends, however it ends."""

    def __init__(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(folder / name, "a+", encoding="utf-8")  # noqa: SIM115 (held until let go)
        except OSError as problem:
            raise InputError(f"cannot use the folder {folder}: {problem.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise InputError(f"{folder} is in use by another process ({holder}); wait for it or stop it") from None
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()}")
        self._file.flush()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def is_held(folder: Path, name: str) -> bool:
    """Whether some process holds the folder by this lock; nothing is written."""
    try:
        with open(folder / name, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
