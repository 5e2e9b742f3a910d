"""Files that several processes may look at: written whole or not at all, in folders held by one at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, TextIO

from elle.errors import InputError, WorkError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step."""
    with atomically(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Write beside the target, flush to the disk, rename: a reader sees the old file or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _keep_names(path.parent)
    except BaseException as problem:  # an interrupt leaves no half file either
        with contextlib.suppress(OSError):  # the folder itself may be a file
            temporary.unlink()
        if isinstance(problem, OSError):
            raise not_written(path, problem) from None
        raise


def _keep_names(folder: Path) -> None:
    """Make a rename survive a power cut, where the filesystem can: the file is written, and in its place, already."""
    try:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def write_text(path: Path, text: str) -> None:
    """A text file, in one step."""
    write_atomically(path, text.encode("utf-8", "replace"))


def write_json(path: Path, value: Any) -> None:
    """A JSON file, in one step."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def append_line(path: Path, value: Any) -> None:
    """One more JSON line at the end of a file; what a full disk has left of the line before is cut off."""
    try:
        with open(path, "ab+") as file:
            _cut_torn_line(file)
            file.write(json.dumps(value).encode() + b"\n")
    except OSError as problem:
        raise not_written(path, problem) from None


def _cut_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without its end; `file` is open to read and append."""
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def write_lines(path: Path, values: list[Any]) -> None:
    """A file with one JSON value a line, atomically."""
    write_atomically(path, "".join(json.dumps(value) + "\n" for value in values).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of such a file, none where there is no file; a last line without its end is still being written."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # bytes that are no text will not be JSON either
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; repair that, or leave that run out") from None
    values: list[Any] = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            values.append(json.loads(line))
        except ValueError:
            values.append(None)
        if not isinstance(values[-1], dict):
            raise InputError(f"{path} is damaged in line {number}; take that line out, then run it again")
    return values


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def not_written(path: Path, problem: OSError) -> WorkError:
    """The one line for a file that could not be written."""
    return WorkError(
        f"could not write {path}: {problem.strerror or problem}; what was there before is untouched; "
        f"repair that and run it again (a training continues with --resume)"
    )


class FolderLock:
    """Holds a folder for one process; the system lets go when the process ends, however it ends."""

    _held: ClassVar[weakref.WeakSet[FolderLock]] = weakref.WeakSet()

    def __init__(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(folder / name, "a+", encoding="utf-8")  # noqa: SIM115 (held until let go)
        except OSError as problem:
            raise InputError(f"cannot use the folder {folder}: {problem.strerror}; choose another --out") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second over SMB, where what is held cannot be read either
            holder = "unknown"
            with contextlib.suppress(PermissionError):
                self._file.seek(0)
                holder = self._file.read().strip() or holder
            self._file.close()
            raise InputError(
                f"{folder} is in use by another process ({holder}); wait for it or choose another --out"
            ) from None
        except OSError as problem:  # of a filesystem without locks, such as a Lustre that is mounted so
            words = "see to it yourself that no other process works in it"
            print(f"elle: {folder} cannot be locked ({problem.strerror}); {words}", file=sys.stderr)
        # Who holds the folder is a courtesy: where a disk is full, the work itself says what it cannot write. Past the
        # file's own buffer, which would be written when it is closed, and fail there once more.
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            os.write(self._file.fileno(), f"pid {os.getpid()}".encode())
        self._held.add(self)

    @classmethod
    def let_go_in_child(cls) -> None:
        """A forked worker would hold the folder on for the seconds that it lives longer than a process killed."""
        for lock in cls._held:
            lock._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


os.register_at_fork(after_in_child=FolderLock.let_go_in_child)


def is_held(folder: Path, name: str) -> bool:
    """Whether some process holds the folder by this lock; nothing is written."""
    try:
        with open(folder / name, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it cannot be read, or the filesystem has no locks
        return False
    return False
