"""A run's progress on the terminal: a line an epoch, and a live bar where there is a terminal to draw it on."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from elle.config import Config, format_radius
from elle.engine.watcher import Watcher

if TYPE_CHECKING:
    from elle.engine.monitor import Kind, Reading, Verdict


class TrainingProgress:
    """Prints what a run tells; `watcher()` is handed to the run."""

    def __init__(self, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=None)
        self.steps = self.done_before = 0
        self.epochs: int | None = None
        self.started = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def watcher(self) -> Watcher:
        return Watcher(self._started, self._stepped, self._recorded, self._said, self._judged, self._looked)

    def _started(self, config: Config, steps: int, done: int) -> None:
        self.steps, self.done_before, self.epochs, self.started = steps, done, config.epochs, time.monotonic()
        self.bar.update(self.task, total=steps, completed=done)
        self._said(
            f"{config.method} on {config.data}: {config.model}, eps {format_radius(config.eps or 0)}, "
            f"{config.length()}{f', at most {config.max_steps} steps' if config.max_steps else ''}, seed {config.seed}"
        )

    def _stepped(self, step: int) -> None:
        if not self.bar.disable:
            self.bar.update(self.task, completed=step)

    def _recorded(self, record: dict[str, Any]) -> None:
        done, rest = record["step"] - self.done_before, self.steps - record["step"]
        words = describe_record(record, self.epochs)
        if rest == 0 or done > 0:  # otherwise nothing is known: a resumed run has gone back to before where it began
            words += f"  left {(time.monotonic() - self.started) * rest / max(done, 1):.0f} s"
        self._said(_broken(words, self.console.width) if self.console.is_terminal else words)

    def _judged(self, verdict: Verdict) -> None:
        now = "training" if verdict.kind == "recovery" else f"{verdict.kind}, step {verdict.since}"
        self.bar.update(self.task, description=now)

    def _looked(self, reading: Reading, condition: Kind | None) -> None:
        if condition is None:  # healthy, or back from a collapse by itself or by a rollback
            self.bar.update(self.task, description="training")

    def _said(self, text: str) -> None:
        # Nobody may read any more, for which rich would end the process, or the log's disk be full: the training goes
        # on, as all of this is in its files too. A log file wants whole lines; a terminal would break them within a
        # number: E_lin 5.3 and 1e-05.
        with contextlib.suppress(OSError, SystemExit):
            self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)


def _broken(words: str, width: int) -> str:
    """A line as lines of that width, broken at its double spaces: E_lin stays with its number."""
    lines = [""]
    for part in re.split(r"  (?=[a-zA-Z]|[\d.]+ s)", words):
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] or len(lines) > 1 else "") + part
    return "\n".join(lines)


def describe_record(record: dict[str, Any], epochs: int | None) -> str:
    """One epoch in a line."""
    parts = [
        f"epoch {record['epoch']:3d}/{epochs}",
        f"loss {record['loss']:.3f}",
        f"training {record['accuracy']:6.1%}",
    ]
    parts += [
        f"{name} {value:6.1%}" for name, value in record.items() if name == "clean" or name.startswith(("pgd", "fgsm"))
    ]
    if record["error"] is not None:
        parts += [f"E_lin {record['error']:.2e}", f"weight {record['weight']:.3g}"]
    return "  ".join([*parts, f"{record['seconds']:.1f} s"])
