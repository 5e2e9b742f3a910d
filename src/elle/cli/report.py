"""`elle report`: parse and dispatch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elle.cli.options import AsJson
from elle.cli.printing import count_runs, print_json, print_table
from elle.errors import InputError, check_folder


def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|DIR...",
            help="A recipe and folders of its runs (default: runs/RECIPE), or runs and folders of runs.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: report/ in the runs' folder.")
    ] = None,
    delayed: Annotated[
        bool,
        typer.Option("--delayed", help="Show up to which eps, and for how many epochs, each method holds."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report runs on one page, beside the paper's numbers.

    Example: elle report table-2
    """
    if delayed:
        if out is not None:
            raise InputError("--delayed prints its table and writes no file; leave --out out")
        _delayed(sources, as_json)
        return
    from elle.experiments.collected import gather
    from elle.experiments.report import write_report

    if out is not None:
        check_folder(out)
    runs = gather(sources)
    written = write_report(runs, out or runs.folder / "report")
    if as_json:
        print_json([str(path) for path in written])
    else:
        print(f"{count_runs(len(runs.runs))}; {len(written)} files, first {written[0]}")


def _delayed(sources: list[str], as_json: bool) -> None:
    from elle.experiments.collected import find_runs
    from elle.experiments.delayed import COLUMNS, delayed_collapse, describe

    rows = delayed_collapse(find_runs(sources).runs)
    if as_json:
        print_json(rows)
    else:
        print_table(COLUMNS, [describe(row) for row in rows])
