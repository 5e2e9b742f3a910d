"""The files of a run directory. The first rank alone reads and writes them: the others may be on other machines.

All but what a final evaluation has done so far: of this each rank keeps its own share, and looks for what it finds.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from elle.config import Config
from elle.engine import checkpoint
from elle.engine.ranks import Ranks
from elle.errors import InputError, expanded
from elle.files import append_line, read_lines, write_atomically, write_json, write_lines

FINAL = "final.parts"
"""In a run directory, while the final evaluation is under way: what is done of it."""


def run_directory(config: Config) -> Path:
    """Where a run writes: `out`, or runs/ and a name made of its settings."""
    return Path("runs") / config.name() if config.out is None else expanded(config.out)


class RunFiles:
    """A run directory, as all ranks of the run see it.

    A checkpoint is written while the training goes on; whatever else concerns checkpoints waits for it first.
    """

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.directory, self.ranks = directory, ranks
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[Path] | None = None
        """The checkpoint that is being written, if there is one."""

    def open(self, held: contextlib.ExitStack, *, resume: bool, start_from: Path | None) -> Path | None:
        """Lock the directory until `held` is closed; returns the checkpoint to continue from, if there is one."""

        def opened() -> Path | None:
            held.enter_context(checkpoint.RunLock(self.directory))
            held.callback(self._writer.shutdown)  # waits, while the folder is still held
            existing = checkpoint.checkpoints(self.directory)
            if existing and not resume and start_from is None:
                raise InputError(
                    f"{self.directory} already holds a run; continue it with --resume or choose another --out"
                )
            return start_from or (existing[-1] if existing else None)

        return self.ranks.from_first(opened)

    def configure(self, config: Config) -> None:
        """Write config.toml: what a resumed run was given anew holds for the next resume too."""

        def write() -> None:
            write_atomically(self.directory / "config.toml", config.to_toml().encode())

        self.ranks.from_first(write)

    def begin(self) -> None:
        """Empty events.jsonl, which may be of an earlier run here that never came to a checkpoint."""
        if self.ranks.first:
            write_lines(self.directory / "events.jsonl", [])

    def append(self, name: str, value: Any) -> None:
        """One more line in one of the files."""
        if self.ranks.first:
            append_line(self.directory / name, value)

    def event(self, kind: str, **values: Any) -> None:
        self.append("events.jsonl", {"event": kind, "time": round(time.time(), 3)} | values)

    def cut(self, step: int, epoch: int, history: list[Any], readings: list[Any] | None) -> None:
        """Leave nothing of what comes after this step, which is in this epoch, counted from 0."""
        self.settle()
        if not self.ranks.first:
            return
        write_lines(self.directory / "metrics.jsonl", history)
        if readings is not None:
            write_lines(self.directory / "probes.jsonl", readings)
        steps = read_lines(self.directory / "steps.jsonl")
        write_lines(self.directory / "steps.jsonl", [line for line in steps if line["epoch"] <= epoch])
        for newer in checkpoint.checkpoints(self.directory):
            if newer.name > checkpoint.checkpoint_path(self.directory, step).name:
                newer.unlink()

    def saved(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""

        def there() -> bool:
            self._wait()
            return checkpoint.checkpoint_path(self.directory, step).exists()

        return self.ranks.from_first(there)

    def save(self, step: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Begin to write a checkpoint of what the tensors and the header hold now."""

        def begin() -> None:
            self._wait()
            write = checkpoint.take_checkpoint(self.directory, step, tensors, header)
            self._written = self._writer.submit(write)

        self.ranks.from_first(begin)

    def failed(self) -> bool:
        """Whether it is known, to the first rank alone, that the checkpoint could not be written."""
        return self._written is not None and self._written.done() and self._written.exception() is not None

    def settle(self) -> None:
        """Wait for the checkpoint that is being written; where it could not be, all ranks end with the first."""
        self.ranks.from_first(self._wait)

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A checkpoint's tensors and header, for every rank."""
        tensors, header = self.ranks.from_first(lambda: checkpoint.load_checkpoint(path))
        missing = [key for key in ("config", "step", "history", "epoch_seconds") if key not in header]
        if missing:
            raise InputError(f"{path} is not a whole checkpoint: its header has no {missing[0]!r}")
        return tensors, header

    def write_tensors(self, name: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """A network's weights and header, into a file of the directory."""
        if self.ranks.first:
            checkpoint.write_tensors(self.directory / name, tensors, header)

    def write_network(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Write the trained network; where another is there, result.json, which is about that one, is deleted first."""
        self.settle()
        path = self.directory / "model.safetensors"
        if self.ranks.first:
            content = checkpoint.packed(tensors, header)
            if not path.exists() or path.read_bytes() != content:
                with contextlib.suppress(OSError):  # then the network cannot be written either, which is told
                    (self.directory / "result.json").unlink()
                write_atomically(path, content)

    def conclude(self, result: dict[str, Any]) -> None:
        """Write result.json, and delete the parts of the final evaluation, which are no longer needed."""
        parts = self.directory / FINAL

        def write() -> None:
            write_json(self.directory / "result.json", result)
            shutil.rmtree(parts, ignore_errors=True)

        self.ranks.from_first(write)
        shutil.rmtree(parts, ignore_errors=True)  # gone already, but for a rank with a disk of its own
