"""A run's numbers as TensorBoard scalars (pip install 'elle-at[tensorboard]')."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elle.errors import InputError

if TYPE_CHECKING:
    from elle.engine.loop import Watcher
    from elle.engine.monitor import Kind, Reading, Verdict


def with_tensorboard(watcher: Watcher, folder: Path) -> Watcher:
    """The watcher, which now also writes the numbers of every record and look, and every verdict, into `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs an extra: pip install 'elle-at[tensorboard]'") from None
    writers: list[Any] = []

    def writer() -> Any:
        # With the first number: what the input gets wrong leaves no folder behind.
        if not writers:
            writers.append(SummaryWriter(str(folder)))
        return writers[0]

    def recorded(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float):
                writer().add_scalar(name, value, record["step"])
        writer().flush()
        watcher.recorded(record)

    def judged(verdict: Verdict) -> None:
        writer().add_text("verdict", str(verdict), verdict.step)
        writer().flush()
        watcher.judged(verdict)

    def looked(reading: Reading, condition: Kind | None) -> None:
        for name, value in reading.items():
            if isinstance(value, float):
                writer().add_scalar(f"probe/{name}", value, reading["step"])
        writer().flush()
        watcher.looked(reading, condition)

    return replace(watcher, recorded=recorded, judged=judged, looked=looked)
