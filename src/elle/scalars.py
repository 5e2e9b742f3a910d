"""A run's numbers as TensorBoard scalars (pip install 'elle-at[tensorboard]')."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elle.errors import InputError
from elle.files import not_written

if TYPE_CHECKING:
    from elle.config import Config
    from elle.engine.loop import Watcher
    from elle.engine.monitor import Kind, Reading, Verdict


def with_tensorboard(watcher: Watcher, folder: Path) -> Watcher:
    """The watcher, which now also writes the numbers of every record and look, and every verdict, into `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs an extra: pip install 'elle-at[tensorboard]'") from None
    writers: list[Any] = []
    begun = last = 0

    def started(config: Config, steps: int, done: int) -> None:
        nonlocal begun
        begun = done
        watcher.started(config, steps, done)

    def write(put: Callable[[Any], None]) -> None:
        try:
            # With the first number: what the input gets wrong leaves no folder behind.
            if not writers:
                # What was written of later steps, before a kill or a rollback, comes again.
                writers.append(SummaryWriter(str(folder), purge_step=begun + 1))
            put(writers[0])
            writers[0].flush()
        except OSError as problem:
            raise not_written(folder, problem) from None

    def write_numbers(values: Mapping[str, Any], prefix: str = "") -> None:
        nonlocal begun, last
        if values["step"] < last:  # rolled back, and this is the first step of those undone that has numbers
            begun = values["step"] - 1
            writers.pop().close()
        last = values["step"]

        def put(writer: Any) -> None:
            for name, value in values.items():
                if isinstance(value, float):
                    writer.add_scalar(prefix + name, value, values["step"])

        write(put)

    def recorded(record: dict[str, Any]) -> None:
        write_numbers(record)
        watcher.recorded(record)

    def judged(verdict: Verdict) -> None:
        write(lambda writer: writer.add_text("verdict", str(verdict), verdict.step))
        watcher.judged(verdict)

    def looked(reading: Reading, condition: Kind | None) -> None:
        write_numbers(reading, "probe/")
        watcher.looked(reading, condition)

    return replace(watcher, started=started, recorded=recorded, judged=judged, looked=looked)
