"""How the command prints: JSON for programs, tables for people."""

from __future__ import annotations

import json
import sys
from typing import Any


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


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table as wide as the terminal, or wide enough for whole lines where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, whole in zip(columns, _whole_columns(columns, rows, console.width), strict=True):
        table.add_column(column, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: a class may be called [red]
    console.print(table)


def _whole_columns(columns: list[str], rows: list[list[str]], width: int) -> list[bool]:
    """Which columns stay in one piece, so that long texts break on a narrow terminal and not names or numbers.

    Where there is no room for that, the first alone, by which a row is asked for.
    """
    widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
    short = [one <= 20 for one in widths]
    room = width - sum(one + 2 for one, whole in zip(widths, short, strict=True) if whole)
    if room >= 14 * short.count(False):
        return short
    return [number == 0 and widths[0] <= 24 for number in range(len(columns))]


def print_accuracies(result: dict[str, dict[str, Any]]) -> None:
    """A line for each attack of a result."""
    rows = []
    for name, one in result.items():
        low, high = one["interval"]
        rows.append([name, f"{one['accuracy']:.2%}", f"{low:.2%} to {high:.2%}", f"{one['correct']} of {one['total']}"])
    print_table(["attack", "accuracy", "95 % interval", "correct"], rows)
