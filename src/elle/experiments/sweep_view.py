"""A sweep as it is watched: one live table on a terminal, a line a change where there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elle.config import format_value
from elle.experiments.collected import flat, telling_keys
from elle.experiments.sweep import Item, counts

_ORDER = {"running": 0, "failed": 1, "stopped": 1, "waiting": 2, "finished": 3}
_STYLES = {"running": "bold", "failed": "red", "stopped": "yellow", "finished": "green", "waiting": "dim"}
_SAID = 24
"""Characters of what a run reached for which its line leaves room."""


class SweepView:
    """Shows the runs; called with a run whose state has changed, or with None as time passes."""

    def __init__(self, items: Sequence[Item], to_stderr: bool = False) -> None:
        self.items = items
        self.keys, self.all_keys = shown_keys(items), shown_keys(items, named=False)
        self.console = Console(stderr=to_stderr, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.started = self.drawn = time.monotonic()
        self.epochs_before = sum(item.epochs_done for item in items)
        self.told = {item.name: item.state for item in items}

    def __enter__(self) -> SweepView:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(self._table(ended=True), refresh=True)
            self.live.stop()

    def __call__(self, changed: Item | None) -> None:
        with contextlib.suppress(OSError, SystemExit):  # a log that nobody reads, or without room, ends no sweep
            self._show(changed)

    def _show(self, changed: Item | None) -> None:
        if not self.live:
            for item in self.items:
                if self.told[item.name] != item.state:
                    self.told[item.name] = item.state
                    self.console.print(self._line(item), markup=False, soft_wrap=True)
        elif changed or time.monotonic() - self.drawn > 1:
            self.drawn = time.monotonic()
            self.live.update(self._table(), refresh=True)

    def left(self) -> float | None:
        """Seconds to the end at the pace so far, epochs of all runs counted alike; None before the first is done."""
        done = sum(item.epochs_done for item in self.items) - self.epochs_before
        known = [item.epochs for item in self.items if item.epochs is not None]
        if done <= 0 or not known:
            return None
        ahead = sum((item.epochs or max(known)) - item.epochs_done for item in self.items
                    if item.state in ("running", "waiting"))  # fmt: skip
        return (time.monotonic() - self.started) * ahead / done

    def _line(self, item: Item) -> str:
        ended = sum(one.state in ("finished", "failed") for one in self.items)
        said = f": {item.said}" if item.said else ""
        return f"[{ended}/{len(self.items)}] {item.state:8} {item.name}{said}{self._eta()}"

    def _eta(self) -> str:
        left = self.left()
        return "" if not left else f"  left {duration(left)}"

    def _table(self, ended: bool = False) -> Group:
        """The runs that fit on the screen, those that are being made first."""
        room = max(5, self.console.height - 4)
        items = sorted(self.items, key=lambda item: _ORDER[item.state])
        shown = items[:room]
        table = _lines(shown, columns(self.keys), self.keys)
        said = max((len(item.said) for item in shown), default=0)
        room_for_said = self.console.width - Console(width=100_000).measure(table).maximum + said
        if room_for_said < min(said, _SAID):
            # The settings tell the runs apart as well as their long names, and cut off neither would.
            table = _lines(shown, columns(self.all_keys)[1:], self.all_keys)
        below = [Text(f"{item.name}: {item.said}") for item in shown if ended and len(item.said) > room_for_said]
        more = [Text(f"and {len(items) - room} more", style="dim")] if len(items) > room else []
        summary = ", ".join(f"{count} {state}" for state, count in counts(self.items).items())
        return Group(table, *more, *below, Text(summary if ended else f"{summary}{self._eta()}", style="bold"))


def _lines(items: Sequence[Item], heads: Sequence[str], keys: Sequence[str]) -> Table:
    """A line a run, however much it has to say: as many runs as lines have room on the screen."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        # Where not even the settings have room, what is cut off says so: 100000 would read 1000.
        table.add_column(head, no_wrap=head != "")
    for item in items:
        *told, said = cells(item, keys)[-len(heads) :]
        table.add_row(*map(Text, told), Text(said, no_wrap=True), style=_STYLES[item.state])
    return table


def shown_keys(items: Sequence[Item], named: bool = True) -> list[str]:
    """Method and eps, and whatever else tells the runs apart; where they are `named`, their data is in their names."""
    telling = telling_keys([item.config for item in items], ["method", "eps", "data"])
    return ["method", "eps", *(key for key in telling if key not in ("method", "eps", "data" if named else ""))]


def columns(keys: Sequence[str]) -> list[str]:
    """The head of the table; a method's own fields share a column, as most runs have few of them."""
    own = ["options"] if any(key.startswith("method.") for key in keys) else []
    return ["run", *(key for key in keys if not key.startswith("method.")), *own, "seed", "epoch", "state", ""]


def cells(item: Item, keys: Sequence[str]) -> list[str]:
    """A run's row of the table."""
    values = flat(item.config)
    told = [format_value(key, values.get(key)) for key in keys if not key.startswith("method.")]
    own = [key for key in keys if key.startswith("method.")]
    if own:
        has = [key for key in own if values.get(key) is not None]
        told.append(", ".join(f"{key}={format_value(key, values[key])}" for key in has) or "-")
    epochs = f"{item.epochs_done:g}/{item.epochs or '?'}"
    return [item.name, *told, str(item.config.seed), epochs, item.state, item.said]


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
