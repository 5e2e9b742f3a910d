"""The files of a set, in a folder or a .tar.gz: every size is bounded before anything is allocated."""

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Protocol

from elle.errors import InputError, WorkError

MAX_BYTES = 2**30
"""Of one file, and of everything in one archive: five times the largest set that is read this way."""
_MAX_ENTRIES = 10_000
"""Of one archive; the official ones have eight."""
_BLOCK = 512


class Files(Protocol):
    """Named contents; `label` is what a message calls one of them."""

    @property
    def where(self) -> Path: ...
    def names(self) -> Sequence[str]: ...
    def label(self, name: str) -> str: ...
    def read(self, name: str) -> bytes: ...


def names_in(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """The sorted names of what is wanted of a folder; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if wanted(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror}); check its permissions") from None


@dataclass(frozen=True)
class Folder:
    """The files directly in a folder, less unfinished downloads."""

    where: Path

    def names(self) -> Sequence[str]:
        return names_in(self.where, lambda entry: entry.is_file() and not entry.name.endswith(".part"))

    def label(self, name: str) -> str:
        return str(self.where / name)

    def read(self, name: str) -> bytes:
        return read_bounded(self.where / name)


@dataclass(frozen=True)
class Archive:
    """The wanted files of a .tar.gz, read in one pass without unpacking."""

    where: Path
    contents: dict[str, bytes]

    def names(self) -> Sequence[str]:
        return sorted(self.contents)

    def label(self, name: str) -> str:
        return f"{self.where}: {name}"

    def read(self, name: str) -> bytes:
        return self.contents[name]


def open_archive(path: Path, patterns: Sequence[str]) -> Archive:
    """The files of a .tar.gz whose last name fits a pattern, whatever folder they are in."""
    contents = {}
    for member in read_tar(path):
        name = PurePosixPath(member.name).name
        if member.is_file and any(fnmatch(name, pattern) for pattern in patterns):
            contents[name] = member.read()
    return Archive(path, contents)


def read_bounded(path: Path) -> bytes:
    """The bytes of a file that is no larger than MAX_BYTES."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise InputError(f"{path}: is larger than the {MAX_BYTES} bytes it may have; check the file")
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None


def inflate(raw: bytes | memoryview, size: int, name: str, gzipped: bool = False) -> bytes:
    """Unpack zlib or gzip data, at most `size` bytes."""
    try:
        return zlib.decompressobj(31 if gzipped else 15).decompress(raw, size)
    except zlib.error:
        raise InputError(f"{name}: its compressed data are damaged; get the file again") from None


class _Unzipped:
    """The contents of a .gz file, as a stream whose errors name the file."""

    def __init__(self, path: Path, file: gzip.GzipFile) -> None:
        self.path, self._file = path, file

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or "is no gzip file, cut short or damaged"
            raise InputError(f"{self.path}: {reason}; get the file again") from None


class Member:
    """One entry of a tar file; it must be read before the next is asked for."""

    def __init__(self, name: str, size: int, kind: bytes, stream: _Unzipped) -> None:
        self.name, self.size, self.left, self._stream = name, size, size, stream
        self.is_file = kind in (b"0", b"\0")
        self.is_folder = kind == b"5"
        self.is_note = kind in (b"x", b"g")

    def read(self, size: int | None = None) -> bytes:
        """The next `size` bytes, or all that are left."""
        part = self._stream.read(self.left if size is None else min(size, self.left))
        self.left -= len(part)
        if not part and self.left:
            raise InputError(f"{self._stream.path}: ends within {self.name[:80]!r}; get the file again")
        return part


def read_tar(path: Path) -> Iterator[Member]:
    """The entries of a .tar.gz in order, less those that only say more about others, such as parts of seconds.

    Not by the standard library's tarfile, which also makes links, devices and sparse files of a header's claims,
    and in some versions reads long headers in quadratic time: sets come as plain files, and that is all read here.
    """
    try:
        file = gzip.open(path)  # noqa: SIM115 (closed below; what fails while it is read is another error)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    with file:
        stream = _Unzipped(path, file)
        total = entries = 0
        refusal = InputError(
            f"{path}: unpacks to more than {MAX_BYTES} bytes or {_MAX_ENTRIES} files; get the file again"
        )
        while any(header := stream.read(_BLOCK)):
            member = _member(header, stream)
            total, entries = total + member.size, entries + 1
            if total > MAX_BYTES or entries > _MAX_ENTRIES:
                raise refusal
            if not member.is_note:
                yield member
            while member.left:
                member.read(2**20)
            stream.read(-member.size % _BLOCK)
        # To the very end, which is where the checksum is: pixels that are damaged may well unpack.
        while rest := len(stream.read(2**20)):
            total += rest
            if total > MAX_BYTES:
                raise refusal


def _member(header: bytes, stream: _Unzipped) -> Member:
    try:
        size, checksum = (int(field.strip(b" \0") or b"0", 8) for field in (header[124:136], header[148:156]))
    except ValueError:
        size = checksum = -1
    if size < 0 or checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise InputError(f"{stream.path}: is no tar file, or damaged; get the file again")
    return Member(_name(header), size, header[156:157], stream)


def _name(header: bytes) -> str:
    """The name field, after the prefix field where the header is of the ustar kind."""
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell in one line that the file could not be written."""
    try:
        yield
    except OSError as problem:
        raise WorkError(f"could not write {path}: {problem.strerror}; repair that and run it again") from None


def unpack(archive: Path, target: Path) -> list[Path]:
    """Write the files of a .tar.gz under `target`; one refused entry and nothing is written.

    Refused: absolute paths, `..`, links, devices, and more than MAX_BYTES in all.
    """
    for member in read_tar(archive):
        _destination(archive, member, target)
    written = []
    for member in read_tar(archive):
        path = _destination(archive, member, target)
        if not member.is_file:
            continue
        with writing(path):
            _write(path, member, target)
        written.append(path)
    return written


def _write(path: Path, member: Member, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(target.resolve()):
        raise InputError(f"{path.parent}: is a link out of {target}; remove it")
    part = path.with_name(f"{path.name}.part")  # so that an interrupt leaves no half file under the real name
    part.unlink(missing_ok=True)  # never through a link that is already there
    with open(part, "xb") as file:
        while some := member.read(2**20):
            file.write(some)
    os.replace(part, path)


def _destination(archive: Path, member: Member, target: Path) -> Path:
    parts = PurePosixPath(member.name.replace("\\", "/")).parts
    if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0] or "\0" in member.name:
        raise InputError(f"{archive}: refused to unpack {member.name[:80]!r}, which leaves the folder; get it again")
    if not (member.is_file or member.is_folder):
        raise InputError(f"{archive}: refused to unpack {member.name[:80]!r}, no plain file; get it again")
    return target.joinpath(*parts)
