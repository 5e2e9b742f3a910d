"""The finished runs of a sweep under an object path, s3://bucket/runs, beside the folder in which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elle.errors import InputError, WorkError, first_line
from elle.experiments.sweep import MANIFEST, Item
from elle.experiments.training import RESULT, is_finished
from elle.files import write_atomically


class ObjectPath:
    """Copies runs there and back; a run counts as being there once its result, the last file copied, is."""

    def __init__(self, url: str) -> None:
        try:
            from pyarrow import fs
        except ImportError:
            raise InputError(f"--out {url} needs pyarrow; pip install 'elle-at[parquet]'") from None
        self.url, self._fs = url.rstrip("/"), fs
        self.problem: WorkError | None = None
        try:
            self._files, self._path = fs.FileSystem.from_uri(self.url)
        except (ValueError, OSError) as problem:
            raise InputError(f"--out {url}: {first_line(problem)}; write a folder, or s3://BUCKET/PATH") from None
        if not self._path:
            raise InputError(f"--out {url}: it names no bucket; write a folder, or s3://BUCKET/PATH")

    def holds(self, item: Item) -> bool:
        """Whether the finished run is there."""
        try:
            (found,) = self._files.get_file_info([self._place(item.name, RESULT)])
        except OSError as problem:
            raise WorkError(f"{self.url} cannot be read: {first_line(problem)}") from None
        return bool(found.type == self._fs.FileType.File)

    def even_out(self, folder: Path, items: Sequence[Item]) -> None:
        """Fetch what is finished only there, and copy what is finished only here; first of all the list of runs."""
        self._write(folder / MANIFEST, self._place(MANIFEST))
        for item in items:
            there = self.holds(item)
            if there and not is_finished(item.path):
                self._fetch(item)
                item.state = "finished"
                item.look()
            elif item.state == "finished" and not there:
                self.put(item)

    def follow(self, item: Item | None) -> None:
        """Copy a run that has just finished; if that fails the sweep goes on, and `problem` tells in the end."""
        if item and item.state == "finished":
            try:
                self.put(item)
            except WorkError as problem:
                self.problem = problem

    def put(self, item: Item) -> None:
        """Copy a finished run without its checkpoints, which it no longer needs."""
        files = [file for file in sorted(item.path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
        files = [file for file in files if file.parent.name != "checkpoints"]
        files.sort(key=lambda file: file.name == RESULT)
        for file in files:
            self._write(file, self._place(file.relative_to(item.path.parent).as_posix()))

    def _write(self, file: Path, place: str) -> None:
        try:
            with self._stream(place) as stream:
                stream.write(file.read_bytes())
        except OSError as problem:
            raise WorkError(
                f"{file} could not be copied to {self.url} ({first_line(problem)}); it is safe where it is, and the "
                f"same command tries again"
            ) from None

    def _stream(self, place: str) -> Any:
        try:
            return self._files.open_output_stream(place)
        except FileNotFoundError:  # a file system with folders
            self._files.create_dir(place.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(place)

    def _fetch(self, item: Item) -> None:
        place = self._place(item.name)
        try:
            found: list[Any] = self._files.get_file_info(self._fs.FileSelector(place, recursive=True))
            files = [one.path for one in found if one.type == self._fs.FileType.File]
            for path in sorted(files, key=lambda path: path.endswith(f"/{RESULT}")):
                name = path[len(place) + 1 :]
                if name.startswith("/") or ".." in name.split("/"):  # an object may be called anything
                    raise WorkError(f"{self.url} holds {path!r}, which leaves the folder of its run; remove it there")
                target = item.path / name
                with self._files.open_input_stream(path) as stream:
                    write_atomically(target, stream.read())
        except OSError as problem:
            raise WorkError(f"{item.name} could not be fetched from {self.url}: {first_line(problem)}") from None

    def _place(self, *names: str) -> str:
        return "/".join([self._path.rstrip("/"), *names])
