"""A run's numbers as TensorBoard scalars (pip install 'elle-at[tensorboard]')."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elle.engine.watcher import Watcher
from elle.errors import InputError
from elle.files import not_written

if TYPE_CHECKING:
    from elle.config import Config
    from elle.engine.monitor import Kind, Reading, Verdict


def with_tensorboard(watcher: Watcher, folder: Path) -> Watcher:
    """The watcher, which now also writes the numbers of every record and look, and every verdict, into `folder`."""
    own = _Scalars(watcher, folder)
    return replace(watcher, started=own.started, recorded=own.recorded, judged=own.judged, looked=own.looked)


class _Scalars:
    """Writes what a run tells, and hands it on to the watcher."""

    def __init__(self, watcher: Watcher, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--tensorboard needs an extra: pip install 'elle-at[tensorboard]'") from None
        self.watcher, self.folder = watcher, folder
        self.new_writer: Any = SummaryWriter
        self.writer: Any = None
        self.begun = 0
        """The step behind which this writer's numbers begin."""
        self.last = 0
        """The last step that has numbers."""

    def started(self, config: Config, steps: int, done: int) -> None:
        self.begun = done
        self.watcher.started(config, steps, done)

    def recorded(self, record: dict[str, Any]) -> None:
        self._write_numbers(record)
        self.watcher.recorded(record)

    def judged(self, verdict: Verdict) -> None:
        self._write(lambda writer: writer.add_text("verdict", str(verdict), verdict.step))
        self.watcher.judged(verdict)

    def looked(self, reading: Reading, condition: Kind | None) -> None:
        self._write_numbers(reading, "probe/")
        self.watcher.looked(reading, condition)

    def _write_numbers(self, values: Mapping[str, Any], prefix: str = "") -> None:
        step = values["step"]
        if step < self.last:  # rolled back, and this is the first step of those undone that has numbers
            self.begun = step - 1
            self.writer.close()
            self.writer = None
        self.last = step

        def put(writer: Any) -> None:
            for name, value in values.items():
                if isinstance(value, float):
                    writer.add_scalar(prefix + name, value, step)

        self._write(put)

    def _write(self, put: Callable[[Any], None]) -> None:
        try:
            if self.writer is None:  # with the first number: what the input gets wrong leaves no folder behind
                # What was written of later steps, before a kill or a rollback, comes again.
                self.writer = self.new_writer(str(self.folder), purge_step=self.begun + 1)
            put(self.writer)
            self.writer.flush()
        except OSError as problem:
            raise not_written(self.folder, problem) from None
