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
_NARROW = ("run", "epoch", "multi-step", "best", "state")
"""What is worth most, for a terminal on which not all columns have room."""
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
    with Live(console=console, auto_refresh=False) as live:
        while True:
            for run in runs:
                run.read()
            if all(run.finished() or run.stopped() is not None for run in runs):
                live.update(view(runs, console.width), refresh=True)
                break
            # What a live view has no lines for would not be seen.
            live.update(view(runs, console.width, console.height if console.is_terminal else None), refresh=True)
            time.sleep(_PAUSE)
    if not console.is_terminal:
        console.print()  # rich ends the last line on a terminal only


def view(runs: Sequence[RunDirectory], width: int, height: int | None = None) -> Group:
    """A line a run, the course of its accuracy under attack, and what its monitor has said.

    Of runs that are more than `height` lines, those that still train come first, and the last are counted.
    """
    names = unique_names(runs)
    rows = [(run, [own, *_cells(run)]) for run, own in zip(runs, names, strict=True)]
    said = [Text(f"{own}: {line}") for run, own in zip(runs, names, strict=True) for line in _said(run)][-8:]
    whole = Console(width=100_000).measure(_table(_COLUMNS, rows)).maximum
    columns = _COLUMNS if whole <= width else _NARROW
    shown, group = rows, Group(_table(columns, rows), *said)
    while height and (excess := len(Console(width=width).render_lines(group)) - height) > 0 and len(shown) > 1:
        if shown is rows:
            shown = sorted(rows, key=lambda row: row[0].finished() or row[0].stopped() is not None)
        shown = shown[: -min(max(1, excess // 2), len(shown) - 1)]
        more = Text(f"and {len(rows) - len(shown)} more", style="dim")
        group = Group(_table(columns, shown), more, *said)
    return group


def _table(columns: Sequence[str], rows: Sequence[tuple[RunDirectory, list[str]]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        # Names that are cut at their end would be the same name.
        table.add_column(name, overflow="fold", no_wrap=name not in ("run", "state"))
    for _, cells in rows:
        by_name = dict(zip(_COLUMNS, cells, strict=True))
        table.add_row(*(Text(by_name[name]) for name in columns))  # as it is: a folder may be called [red]
    return table


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
            since = f"since step {event['since']}, reported " if "since" in event else ""
            lines.append(f"{event['event'].replace('_', ' ')} {since}at step {event['step']}: {event['evidence']}")
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
