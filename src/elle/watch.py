"""`elle watch`: runs followed in the terminal, side by side, while they train or after."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elle.config import format_radius
from elle.experiments.rundir import RunDirectory, goes_on, method_after, open_runs, unique_names
from elle.experiments.training import is_running

_COLUMNS = ("run", "method", "eps", "epoch", "loss", "training", "clean", "multi-step", "best", "E_lin", "weight",
            "course", "state")  # fmt: skip
WIDE = 120
"""Characters of a terminal on which all columns have room; a narrower one shows what is worth most."""
_NARROW = ("run", "epoch", "multi-step", "best", "state")
_SILENCE = 60.0
"""Seconds without a line, after which a run that nobody holds is not called training."""
_PAUSE = 1.0
"""Seconds between looks."""
_WIDTH = 24
"""Characters of a course."""
_BARS = "▁▂▃▄▅▆▇█"


def watch(paths: Sequence[Path], once: bool) -> None:
    """Show the runs until all have finished or stopped, or `once`."""
    runs = open_runs(paths)
    # A log file wants whole lines, however long: no wrapping where no terminal sets a width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    if once:
        console.print(view(runs, console.width))
        return
    with Live(view(runs, console.width), console=console, auto_refresh=False) as live:
        while True:
            for run in runs:
                run.read()
            live.update(view(runs, console.width), refresh=True)
            if all(run.finished() or run.stopped() is not None for run in runs):
                break
            time.sleep(_PAUSE)
    if not console.is_terminal:
        console.print()  # rich ends the last line on a terminal only


def view(runs: Sequence[RunDirectory], width: int) -> Group:
    """A line a run, the course of its accuracy under attack, and what its monitor has said."""
    columns = [name for name in _COLUMNS if width >= WIDE or name in _NARROW]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    names = unique_names(runs)
    for run, own in zip(runs, names, strict=True):
        cells = dict(zip(_COLUMNS, [own, *_cells(run)], strict=True))
        table.add_row(*(cells[name] for name in columns))
    said = [Text(f"{own}: {line}") for run, own in zip(runs, names, strict=True) for line in _said(run)]
    return Group(table, *said[-8:])


def _cells(run: RunDirectory) -> list[str]:
    record = run.records[-1] if run.records else {}
    attack = run.multi_step()
    # The tracked attack where there is one, otherwise the monitor's.
    name, looks = (attack, run.records) if attack else ("multi", run.probes)
    course = [one[name] for one in looks if one.get(name) is not None]
    last = run.probes[-1] if run.probes else {}
    error = next((value for value in (record.get("error"), last.get("error")) if value is not None), None)
    return [
        run.config.method,
        format_radius(run.config.eps or 0),
        f"{record.get('epoch', 0)}/{run.config.epochs}",
        _number(record.get("loss"), ".3f"),
        _number(record.get("accuracy"), ".1%"),
        _number(record.get("clean", last.get("clean")), ".1%"),
        _number(course[-1] if course else None, ".1%"),
        _number(max(course, default=None), ".1%"),
        _number(error, ".1e"),
        _number(record.get("weight"), ".3g"),
        sparkline(course),
        _state(run),
    ]


def _number(value: Any, shape: str) -> str:
    return "-" if value is None else format(value, shape)


def _state(run: RunDirectory) -> str:
    step = run.collapse_step()
    rollbacks = run.rollbacks()
    words = "training" if run.records or run.probes else "starting"
    if run.stopped() is not None:
        words = "stopped"
    elif run.finished():
        words = "finished"
    elif _abandoned(run.path):
        words = "not running here"
    words += "" if step is None else f", collapsed at step {step}"
    return words + (f", rolled back {rollbacks} x" if rollbacks else "")


def _abandoned(path: Path) -> bool:
    """Whether no process of this machine trains in it, and none has written for a while.

    It was killed, or is on another machine, whose locks may not be seen here.
    """
    if is_running(path):
        return False
    latest = 0.0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # on another machine files come and go while we look
            latest = max(latest, file.stat().st_mtime)
    return time.time() - latest > _SILENCE


def _said(run: RunDirectory) -> list[str]:
    lines = []
    for event in run.events:
        if "evidence" in event:
            lines.append(f"{event['event'].replace('_', ' ')} at step {event['step']}: {event['evidence']}")
        elif event["event"] == "rollback":
            now = f": now {method_after(event)}" if goes_on(event) else ""
            lines.append(f"rolled back from step {event['undone_from']} to {event['step']}{now}")
    reason = run.stopped()
    if reason:
        lines.append(reason)
    elif not run.finished() and _abandoned(run.path):
        command = f"elle train --out {shlex.quote(str(run.path))} --resume"
        lines.append(f"no process trains in it here; `{command}` goes on where it was saved")
    return lines


def sparkline(values: Sequence[float]) -> str:
    """The last values as a row of bars, from 0 to their highest."""
    shown = list(values)[-_WIDTH:]
    top = max(shown, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] if top > 0 else _BARS[0] for value in shown)
