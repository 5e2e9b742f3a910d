"""How the command prints: JSON for programs, tables for people."""

from __future__ import annotations

import json
import sys
from typing import Any

_SHORT, _NARROWEST = 20, 14
"""Characters: up to which a column stays in one piece, and below which a text that breaks cannot be read."""


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2))


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Records as JSON or as a table; what a record does not say stays empty."""
    if as_json:
        print_json(rows)
    else:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        print_table(columns, [["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows])


def print_table(columns: list[str], rows: list[list[str]], *, explained: bool = False) -> bool:
    """A table as wide as the terminal, or wide enough for whole lines where there is none.

    `explained`: the last column only says what a row is, and is left out where it has no room. Whether all was shown.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    whole = True
    if explained:
        bare = columns[:-1], [row[:-1] for row in rows]
        whole = _room(*bare, console.width) >= 24
        columns, rows = (columns, rows) if whole else bare
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, unbroken in zip(columns, _whole_columns(columns, rows, console.width), strict=True):
        table.add_column(column, overflow="fold", no_wrap=unbroken)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: a class may be called [red]
    console.print(table)
    return whole


def _whole_columns(columns: list[str], rows: list[list[str]], width: int) -> list[bool]:
    """Which columns stay in one piece, so that long texts break on a narrow terminal and not names or numbers.

    Where there is no room for that, the first alone, by which a row is asked for.
    """
    widths = _widths(columns, rows)
    short = [one <= _SHORT for one in widths]
    if _room(columns, rows, width) >= _NARROWEST * short.count(False):
        return short
    return [number == 0 and widths[0] <= 24 for number in range(len(columns))]


def _room(columns: list[str], rows: list[list[str]], width: int) -> int:
    """The characters of a line that the short columns leave for texts."""
    return width - sum(one + 2 for one in _widths(columns, rows) if one <= _SHORT)


def _widths(columns: list[str], rows: list[list[str]]) -> list[int]:
    return [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]


def count_runs(count: int) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} run{'s' * (count != 1)}"


def print_accuracies(result: dict[str, dict[str, Any]]) -> None:
    """A line for each attack of a result."""
    rows = []
    for name, one in result.items():
        low, high = one["interval"]
        rows.append([name, f"{one['accuracy']:.2%}", f"{low:.2%} to {high:.2%}", f"{one['correct']} of {one['total']}"])
    print_table(["attack", "accuracy", "95 % interval", "correct"], rows)
